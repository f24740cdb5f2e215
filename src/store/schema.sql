-- The database, version 1, as a new one is made. An older one is brought to the same form by upgrades.rs.
-- Times are Unix seconds, durations milliseconds with fractions, token figures what the runtime measured.

CREATE TABLE keys (
    id          TEXT    NOT NULL PRIMARY KEY,  -- key_ and 16 hexadecimal digits
    digest      BLOB    NOT NULL UNIQUE,       -- SHA-256 of the secret; the secret itself is kept nowhere
    name        TEXT    NOT NULL,              -- 1 to 64 printable characters, for people
    permissions TEXT    NOT NULL,              -- comma separated: completions, metrics
    created     INTEGER NOT NULL,
    expires     INTEGER,                       -- from this second on it is refused; null: never
    last_used   INTEGER,                       -- true to the minute
    revoked     INTEGER                        -- since when; null: it is active
) STRICT;

-- One row for every request that a valid key made, whatever came of it. A request that goes to the runtime
-- has its row before the call, with null in status and error_code, and its outcome in it afterwards.
CREATE TABLE usage (
    id                INTEGER PRIMARY KEY,       -- in the order of arrival
    request_id        TEXT    NOT NULL UNIQUE,   -- chatcmpl_ and 32 hexadecimal digits, as the client has it
    key_id            TEXT    NOT NULL,          -- keys.id
    created           INTEGER NOT NULL,          -- when the request was complete
    status            INTEGER,                   -- the HTTP status that was sent; null: under way or interrupted
    error_code        TEXT,                      -- error.code that was sent, or 'interrupted'; null: none
    prompt_tokens     INTEGER,                   -- as measured by the runtime; null: not measured
    completion_tokens INTEGER,
    total_tokens      INTEGER,
    duration_ms       REAL,                      -- from the complete request to its answer, waiting included
    queue_ms          REAL,                      -- of these, the wait for a worker
    runtime_ms        REAL,                      -- of these, the calls to the runtime; null: none was made
    grounded          INTEGER NOT NULL DEFAULT 0 -- 1: the answer rests on what Search found
) STRICT;

CREATE INDEX usage_by_time ON usage (created);

-- What a start has to look for after a crash, found without reading the whole table.
CREATE INDEX usage_open ON usage (id) WHERE status IS NULL AND error_code IS NULL;
