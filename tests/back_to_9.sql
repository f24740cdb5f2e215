-- Brings the tables of version 10 back to version 9, on either engine. The version number is not here: each engine has it
-- elsewhere.
DROP INDEX usage_by_key;
DROP INDEX usage_by_seq;
CREATE INDEX usage_by_key ON usage (key_id);
CREATE UNIQUE INDEX usage_by_seq ON usage (gateway, seq) WHERE seq IS NOT NULL;
CREATE INDEX usage_open ON usage (gateway, request_id) WHERE seq IS NULL;
ALTER TABLE usage ADD COLUMN epoch INT;
ALTER TABLE usage_rollup ADD COLUMN runtime_times TEXT;
ALTER TABLE usage_rollup ADD COLUMN own_times TEXT;
ALTER TABLE keys ADD COLUMN last_used INT;
ALTER TABLE gateways ADD COLUMN kept_since INT;
UPDATE gateways SET kept_since = 0;
DROP TABLE moved
