-- The database as version 4 of it was made: upgrade.rs fills it.

CREATE TABLE keys (
    id          TEXT    NOT NULL PRIMARY KEY,  -- key_ and 16 hexadecimal digits
    digest      BLOB    NOT NULL UNIQUE,       -- SHA-256 of the secret; the secret itself is kept nowhere
    name        TEXT    NOT NULL,              -- 1 to 64 printable characters, for people
    permissions TEXT    NOT NULL,              -- comma separated: completions, metrics
    created     INTEGER NOT NULL,
    expires     INTEGER,                       -- from this second on it is refused; null: never
    last_used   INTEGER,                       -- true to the minute
    revoked     INTEGER,                       -- since when; null: it is active
    hint        TEXT                           -- how the secret begins and ends; null: made by an earlier version
) STRICT;

-- One row for every request that a valid key made, whatever came of it. A request that goes to the runtime
-- has its row before the call, with null in status and error_code, and its outcome in it afterwards.
-- The fewer pages a row touches, the sooner its commit is done: so the table is its own index by request_id,
-- which begins with the time, and there is no other by time.
CREATE TABLE usage (
    request_id        TEXT    NOT NULL PRIMARY KEY, -- chatcmpl_ and 32 hexadecimal digits: the first 12 are
                                                    -- created in milliseconds
    key_id            TEXT    NOT NULL,           -- keys.id
    key_name          TEXT    NOT NULL,           -- the key's name at the time: a later one does not change the past
    created           INTEGER NOT NULL,           -- when the request was complete
    status            INTEGER,                    -- the HTTP status that was sent; null: under way or interrupted
    error_code        TEXT,                       -- error.code that was sent, or 'interrupted'; null: none
    prompt_tokens     INTEGER,                    -- as measured by the runtime; null: not measured
    completion_tokens INTEGER,
    total_tokens      INTEGER,
    duration_ms       REAL,                       -- from the complete request to its answer, waiting included
    queue_ms          REAL,                       -- of these, the wait for a worker
    runtime_ms        REAL,                       -- of these, the calls to the runtime; null: none was made
    grounded          INTEGER NOT NULL DEFAULT 0, -- 1: the answer rests on what Search found
    seq               INTEGER,                    -- its place in the chain, in the order of completion; null: open
    hash              BLOB,                       -- SHA-256 over its content and its predecessor's hash
    search_reason     TEXT,                       -- why Search was asked: always, match, model; null: it was not
    search_results    INTEGER,                    -- how many passages it found; null: none asked, or unavailable
    search_ms         REAL                        -- of duration_ms, the wait for Search
) STRICT, WITHOUT ROWID;

-- The newest requests of one key: its entries are in the order of request_id.
CREATE INDEX usage_by_key ON usage (key_id);

-- The chain in its order.
CREATE UNIQUE INDEX usage_by_seq ON usage (seq) WHERE seq IS NOT NULL;

-- Sums of the completed rows, kept in the same transaction as the rows. They stay when old rows are removed.
CREATE TABLE usage_daily (
    day               INTEGER NOT NULL, -- of created: days since 1970-01-01, UTC
    key_id            TEXT    NOT NULL,
    key_name          TEXT    NOT NULL,
    status            INTEGER NOT NULL, -- as in usage; 0 for null
    error_code        TEXT    NOT NULL, -- as in usage; empty for null
    requests          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    total_tokens      INTEGER NOT NULL,
    unmeasured        INTEGER NOT NULL, -- completions without a total: the sums are short by theirs
    PRIMARY KEY (day, key_id, key_name, status, error_code)
) STRICT, WITHOUT ROWID;

-- Where the chain begins, after old rows were removed on purpose, and where open rows begin. One row.
CREATE TABLE chain (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    anchor_seq    INTEGER NOT NULL,           -- of the newest row that was removed; 0: none was
    anchor_hash   BLOB    NOT NULL,
    kept_since    INTEGER NOT NULL,           -- rows created before this may have been removed
    closed_before TEXT    NOT NULL DEFAULT '' -- every row with a lower request_id has its outcome
) STRICT;

INSERT INTO chain (id, anchor_seq, anchor_hash, kept_since) VALUES (1, 0, zeroblob(32), 0);

-- The console's password, as Argon2id keeps it. One row, once it is set.
CREATE TABLE console_password (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    salt       BLOB    NOT NULL,
    hash       BLOB    NOT NULL,
    memory_kib INTEGER NOT NULL, -- what it was made with: a later version may choose otherwise
    passes     INTEGER NOT NULL
) STRICT;

-- Who is signed in to the console, and which browsers were: those are slowed less when they sign in again.
CREATE TABLE console_tokens (
    digest  BLOB    NOT NULL PRIMARY KEY, -- SHA-256 of the cookie's 256 random bits
    kind    TEXT    NOT NULL,             -- session or browser
    expires INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Sums for the console, by minute, hour and day. They are added up after the rows are complete, not with them:
-- usage_folded tells how far. Minutes and hours go when no page shows them any more, days stay.
CREATE TABLE usage_spans (
    span              INTEGER NOT NULL, -- its length in seconds: 60, 3600 or 86400
    start             INTEGER NOT NULL, -- of created
    key_id            TEXT    NOT NULL,
    status            INTEGER NOT NULL, -- as in usage; 0 for null
    error_code        TEXT    NOT NULL, -- as in usage; empty for null
    requests          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    total_tokens      INTEGER NOT NULL,
    unmeasured        INTEGER NOT NULL, -- completions without a total: the sums are short by theirs
    runtime_times     BLOB    NOT NULL, -- how many calls to the runtime took how long; times.rs knows the form
    own_times         BLOB    NOT NULL, -- the same of what else the requests took
    PRIMARY KEY (span, start, key_id, status, error_code)
) STRICT, WITHOUT ROWID;

-- The rows with an error_code, as far as they are folded: few among many are found at once.
CREATE TABLE usage_failures (
    request_id TEXT NOT NULL PRIMARY KEY,
    key_id     TEXT NOT NULL,
    error_code TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Up to which place in the chain the rows are in the two tables above. One row.
CREATE TABLE usage_folded (
    id  INTEGER PRIMARY KEY CHECK (id = 1),
    seq INTEGER NOT NULL
) STRICT;

INSERT INTO usage_folded VALUES (1, 0);
