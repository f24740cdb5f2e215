//! The tables, and the upgrades that bring those of an earlier version to the present one, in the
//! transaction that notes the new version.

use super::rollup::{columns, sums_of_rows};
use crate::database::{Result, Schema, Session};
use crate::when::HOUR;

/// The tables of the ledger, the keys, the audit and the console's sessions.
pub const SCHEMA: Schema = Schema {
    tables: include_str!("schema.sql"),
    version: 10,
    oldest_known: 10,
    upgrades: &[(10, to_version_10)],
    rows: "SELECT CAST(total(head_seq - anchor_seq) AS INT) FROM gateways",
    // A group begins with its gateway's row.
    lock_order: "gateways, keys, usage, usage_rollup",
};

/// Version 9 inserted a row before the runtime was called and changed it afterwards. A row that is
/// still open has no place in the chain and is in no sum. Raising the epochs keeps gateways of
/// version 9 from writing anything.
const TO_VERSION_10: &str = "
    DROP INDEX usage_open;
    DROP INDEX usage_by_key;
    DROP INDEX usage_by_seq;
    DELETE FROM usage WHERE seq IS NULL;
    ALTER TABLE usage DROP COLUMN epoch;
    CREATE INDEX usage_by_key ON usage (key_id, request_id);
    CREATE UNIQUE INDEX usage_by_seq ON usage (gateway, seq);
    DELETE FROM usage_rollup WHERE span = 60;
    ALTER TABLE usage_rollup DROP COLUMN runtime_times;
    ALTER TABLE usage_rollup DROP COLUMN own_times;
    ALTER TABLE keys DROP COLUMN last_used;
    CREATE TABLE moved (id {INT} PRIMARY KEY CHECK (id = 1), target {TEXT} NOT NULL) {STRICT};
    UPDATE gateways SET epoch = epoch + 1 WHERE epoch > 0";

fn to_version_10(session: &Session) -> Result<()> {
    session.run_script(TO_VERSION_10)?;
    restore_hours(session)?;
    session.run_script("ALTER TABLE gateways DROP COLUMN kept_since")
}

/// Version 9 removed hours that were 400 days old by the clock, even if the clock was wrong. They
/// are made again from their rows, as far as these are kept.
fn restore_hours(session: &Session) -> Result<()> {
    let requests =
        "SELECT CAST(coalesce(sum(CASE span WHEN 3600 THEN requests ELSE -requests END), 0) AS BIGINT)
        FROM usage_rollup";
    if session.value::<i64>(requests, &[])? == 0 {
        return Ok(());
    }
    let since = "(SELECT max(kept_since) FROM gateways)";
    session.execute(
        &format!("DELETE FROM usage_rollup WHERE span = 3600 AND start >= {since}"),
        &[],
    )?;
    let sums = sums_of_rows(HOUR, &format!("created / 3600 * 3600 >= {since}"));
    let insert = format!("INSERT INTO usage_rollup ({}) {sums}", columns());
    session.execute(&insert, &[]).map(drop)
}

#[cfg(test)]
mod tests {
    use crate::database::{Access, DatabaseError};
    use crate::ledger::append::tests::write;
    use crate::store::Store;
    use crate::store::tests::Temporary;

    /// Takes away what version 10 has changed.
    pub(super) fn back_to_9(store: &Store) {
        let version = match store.database.sqlite() {
            Some(_) => "PRAGMA user_version = 9",
            None => "UPDATE schema_version SET version = 9, oldest_known = 9",
        };
        store.tamper(&format!(
            "{}; {version}",
            include_str!("../../tests/back_to_9.sql")
        ));
    }

    #[test]
    fn open_rows_minutes_and_histograms_go_and_the_rest_verifies() {
        let mut temporary = Temporary::new();
        let upgrade = || Store::open(&temporary.database, Access::Serve).expect("an upgrade");
        let store = &mut temporary.store;
        store.ledger.join("a", "").expect("a start");
        (1..=30).for_each(|number| write(store, "x", "key_1", number * 20_000, 200, Some(5)));
        while store
            .ledger
            .remove_before(200_000, 1000, 5)
            .expect("a step")
            > 0
        {}
        back_to_9(store);
        store.tamper(
            "INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
                 SELECT request_id || 'z', key_id, key_name, created, gateway, 1 FROM usage;
             INSERT INTO usage_rollup SELECT 60, start, key_id, key_name, status, error_code, gateway, requests,
                 prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime_times, own_times
                 FROM usage_rollup WHERE span = 3600;
             UPDATE gateways SET kept_since = 180001 WHERE name = 'a';
             DELETE FROM usage_rollup WHERE span = 3600 AND start > 300000;
             UPDATE usage_rollup SET requests = 7 WHERE span = 3600 AND start = 298800",
        );
        let upgraded = upgrade();
        let found = upgraded.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (21, None));
        assert_eq!(
            found.unproven.map(|unproven| unproven.count),
            Some(12),
            "three days and nine hours"
        );
        let epoch: i64 = upgraded.value("SELECT epoch FROM gateways WHERE name = 'a'");
        assert_eq!(epoch, 2, "a process of version 9 can't write");
        assert!(matches!(
            store.ledger.try_request(),
            Err(DatabaseError::Fenced)
        ));
        drop(upgrade());
    }
}
