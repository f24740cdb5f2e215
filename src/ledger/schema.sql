-- The database, version 11, as a new one is made.
-- An engine fills in {INT}, {REAL}, {TEXT} and {BLOB}, {ZERO_HASH}, {STRICT} and {CLUSTERED} (stored in the order of its primary key).
-- Times are Unix seconds, durations milliseconds with fractions, token figures what the runtime measured.

CREATE TABLE keys (
    id          {TEXT} NOT NULL PRIMARY KEY,  -- key_ and 16 hexadecimal digits
    name        {TEXT} NOT NULL,              -- 1 to 64 printable characters, for people
    permissions {TEXT} NOT NULL,              -- comma separated: completions, metrics
    created     {INT}  NOT NULL,
    expires     {INT},                        -- refused from this second on; null: never
    revoked     {INT},                        -- since when; null: active
    concurrent  {INT},                        -- how many of its requests a gateway processes at once; null: any number
    budget      {INT},                        -- total_tokens per period; null: none
    budget_per  {TEXT}                        -- day or month; null: no budget
) {STRICT};

-- The secrets of the keys: the present one of each, and those that it has replaced.
CREATE TABLE key_secrets (
    digest  {BLOB} NOT NULL PRIMARY KEY, -- SHA-256 of the secret; the secret itself is stored nowhere
    key_id  {TEXT} NOT NULL,             -- keys.id
    hint    {TEXT} NOT NULL,             -- the first and last digits of the secret
    created {INT}  NOT NULL,
    ends    {INT}                        -- refused from this second on; null: the present one
) {CLUSTERED};

CREATE INDEX key_secrets_by_key ON key_secrets (key_id);

-- One row for every request that a valid key made, whatever its outcome. It is inserted once, with its outcome and its
-- place in the chain, in the transaction that adds it to the sums. No row is ever updated. The table is its own index by
-- request_id, which begins with the time.
CREATE TABLE usage (
    request_id        {TEXT} NOT NULL PRIMARY KEY, -- chatcmpl_ and 32 hexadecimal digits: the first 12 are created in
                                                   -- milliseconds
    key_id            {TEXT} NOT NULL,           -- keys.id
    key_name          {TEXT} NOT NULL,           -- the key's name at the time: a later one does not change the past
    created           {INT}  NOT NULL,           -- when the request was complete
    status            {INT},                     -- the HTTP status that was sent; null: the client has gone
    error_code        {TEXT},                    -- error.code that was sent, or 'abandoned'; null: none
    prompt_tokens     {INT},                     -- as measured by the runtime; null: not measured
    completion_tokens {INT},
    total_tokens      {INT},
    duration_ms       {REAL},                    -- from the complete request to its response, waiting included
    queue_ms          {REAL},                    -- of these, the wait for a worker
    runtime_ms        {REAL},                    -- of these, the calls to the runtime; null: none was made
    grounded          {INT}  NOT NULL DEFAULT 0, -- 1: the answer rests on what Search found
    seq               {INT},                     -- its place in the chain of its gateway
    hash              {BLOB},                    -- SHA-256 over its content and its predecessor's hash
    search_reason     {TEXT},                    -- why Search was asked: always, match; null: it was not
    search_results    {INT},                     -- how many passages it found; null: not asked, or unavailable
    search_ms         {REAL},                    -- of duration_ms, the wait for Search
    gateway           {TEXT} NOT NULL DEFAULT '', -- gateways.name of the one that ran it
    cause             {TEXT},                    -- why it was refused or failed: a word from a fixed list; null: none
    day               {TEXT} NOT NULL            -- the calendar date of created in the database's time zone: YYYY-MM-DD
) {CLUSTERED};

-- The newest requests of one key.
CREATE INDEX usage_by_key ON usage (key_id, request_id);

-- The chains in their order: each gateway has its own.
CREATE UNIQUE INDEX usage_by_seq ON usage (gateway, seq);

-- Rows with an error: few among many.
CREATE INDEX usage_failed ON usage (request_id, key_id, error_code) WHERE error_code IS NOT NULL;

-- Sums of the rows by calendar day. They stay when retention removes the rows. The days of one key, for its budget, lie side
-- by side.
CREATE TABLE usage_days (
    key_id            {TEXT} NOT NULL,
    day               {TEXT} NOT NULL, -- as in usage
    status            {INT}  NOT NULL, -- as in usage; 0 for null
    error_code        {TEXT} NOT NULL, -- as in usage; empty for null
    gateway           {TEXT} NOT NULL, -- as in usage
    requests          {INT}  NOT NULL,
    prompt_tokens     {INT}  NOT NULL,
    completion_tokens {INT}  NOT NULL,
    total_tokens      {INT}  NOT NULL,
    unmeasured        {INT}  NOT NULL, -- completions without a total: the sums do not contain theirs
    PRIMARY KEY (key_id, day, status, error_code, gateway)
) {CLUSTERED};

-- The days of all keys.
CREATE INDEX usage_days_by_day ON usage_days (day);

-- The gateways that share the database, where the chain of each begins after retention has removed rows, and where it ends.
-- The one of a SQLite database has an empty name, and so has its chain after a move to PostgreSQL.
CREATE TABLE gateways (
    name        {TEXT} NOT NULL PRIMARY KEY,
    epoch       {INT}  NOT NULL, -- raised by every start: a process with an earlier one can't write rows any more
    version     {TEXT} NOT NULL, -- of the program
    address     {TEXT} NOT NULL, -- where it listens
    last_seen   {INT},           -- by the database's clock; null: after a clean stop
    anchor_seq  {INT}  NOT NULL, -- of the newest row that was removed; 0: none was
    anchor_hash {BLOB} NOT NULL,
    head_seq    {INT}  NOT NULL, -- of the newest row of its chain; 0: there was none yet
    head_hash   {BLOB} NOT NULL
) {CLUSTERED};

-- The place whose calendar days are counted, and whose clock people read.
CREATE TABLE time_zone (
    id     {INT} PRIMARY KEY CHECK (id = 1),
    name   {TEXT} NOT NULL, -- an IANA name, or UTC
    tzif   {BLOB},          -- its rules, a file of tzdata; null: UTC has none
    tzdata {TEXT}           -- the version of tzdata that they are of; null: not known
) {STRICT};

-- The place that everything was moved to, once it was: `serve` refuses the database from then on.
CREATE TABLE moved (
    id     {INT} PRIMARY KEY CHECK (id = 1),
    target {TEXT} NOT NULL -- the location of the new database, without its password
) {STRICT};

-- The console's password, hashed with Argon2id. One row, once it is set.
CREATE TABLE console_password (
    id         {INT}  PRIMARY KEY CHECK (id = 1),
    salt       {BLOB} NOT NULL,
    hash       {BLOB} NOT NULL,
    memory_kib {INT}  NOT NULL, -- the parameters it was hashed with: a later version may choose others
    passes     {INT}  NOT NULL
) {STRICT};

-- The browsers from which the operator signed in to the console. For 90 days they are known, which gives no access.
CREATE TABLE console_browsers (
    digest       {BLOB} NOT NULL PRIMARY KEY, -- SHA-256 of the cookie's 256 random bits: a sign-in makes a new one
    signed_in    {INT}  NOT NULL,
    session_ends {INT}                        -- 12 hours later; null: ended by a sign-out, a new password or a restore
) {CLUSTERED};

-- Who changed what. The program inserts rows, and neither changes nor removes them.
CREATE TABLE audit (
    id       {TEXT} NOT NULL PRIMARY KEY, -- audit_ and 32 hexadecimal digits: the first 12 are created in milliseconds
    created  {INT} NOT NULL,
    action   {TEXT} NOT NULL, -- key_created, key_changed, key_rotated, key_revoked, password_set, signed_in,
                             -- settings_reloaded, database_restored, time_zone_set, time_zone_renewed
    via      {TEXT} NOT NULL, -- console, command or signal
    actor    {TEXT} NOT NULL, -- the address, the system user or the signal
    details  {TEXT} NOT NULL, -- what was changed; never a secret
    key_id   {TEXT},         -- keys.id; null: not about a key
    key_name {TEXT}          -- the key's name before the change
) {CLUSTERED};

-- The chain of a database that is a file has no name.
INSERT INTO gateways VALUES ('', 0, '', '', NULL, 0, {ZERO_HASH}, 0, {ZERO_HASH});

-- Until the setting is taken: time_zone.rs.
INSERT INTO time_zone VALUES (1, 'UTC', NULL, NULL);
