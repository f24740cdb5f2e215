-- What version 7 has added, taken away again: the result is a database of version 6.
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE chain (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    anchor_seq  INTEGER NOT NULL,
    anchor_hash BLOB    NOT NULL,
    kept_since  INTEGER NOT NULL
) STRICT;
INSERT INTO chain SELECT 1, anchor_seq, anchor_hash, kept_since FROM gateways;
DROP TABLE gateways;
DROP INDEX usage_by_seq;
DROP INDEX usage_unsealed;
ALTER TABLE usage DROP COLUMN gateway;
ALTER TABLE usage DROP COLUMN epoch;
CREATE UNIQUE INDEX usage_by_seq ON usage (seq) WHERE seq IS NOT NULL;
CREATE INDEX usage_unsealed ON usage (seq, request_id) WHERE seq IS NULL;
ALTER TABLE usage_rollup RENAME TO new_rollup;
CREATE TABLE usage_rollup (
    span              INTEGER NOT NULL,
    start             INTEGER NOT NULL,
    key_id            TEXT    NOT NULL,
    key_name          TEXT    NOT NULL,
    status            INTEGER NOT NULL,
    error_code        TEXT    NOT NULL,
    requests          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    total_tokens      INTEGER NOT NULL,
    unmeasured        INTEGER NOT NULL,
    runtime_times     BLOB    NOT NULL,
    own_times         BLOB    NOT NULL,
    PRIMARY KEY (span, start, key_id, key_name, status, error_code)
) STRICT, WITHOUT ROWID;
INSERT INTO usage_rollup SELECT span, start, key_id, key_name, status, error_code, requests, prompt_tokens,
    completion_tokens, total_tokens, unmeasured, runtime_times, own_times FROM new_rollup;
DROP TABLE new_rollup;
DROP TABLE audit;
PRAGMA user_version = 6;
COMMIT;
