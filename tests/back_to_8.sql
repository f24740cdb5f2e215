-- Takes away what version 9 has added, on either engine. The version number is not here: each engine has it elsewhere.
DROP INDEX usage_open;
DROP INDEX rollup_days;
CREATE INDEX usage_unsealed ON usage (seq, gateway, request_id) WHERE seq IS NULL;
ALTER TABLE usage DROP COLUMN cause;
ALTER TABLE keys DROP COLUMN budget;
ALTER TABLE keys DROP COLUMN budget_per;
ALTER TABLE gateways DROP COLUMN head_seq;
ALTER TABLE gateways DROP COLUMN head_hash
