//! The step from version 8 to 9. Version 8 wrote a row's outcome first, and its place in the chain and the sums later: the
//! rows that still wait for these get them here.
//!
//! Raising the epochs keeps gateways of version 8, which would write outcomes without a place, from writing anything.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Result;
use super::chain::ChainLink;
use super::engine::{SqlSession, Statement, bound, values};
use super::keys::NOTE_USE;
use super::ledger::MOVE_HEAD;
use super::ledger_row::{COLUMNS, read_row};
use super::rollup::Batch;

/// The number of rows that are in memory at once.
const ROWS_AT_ONCE: usize = 1000;

/// The interval between two log lines about the progress.
const PROGRESS_TIME: Duration = Duration::from_secs(5);

/// Neither engine adds a column that is not null without a default. SQLite can't drop it afterwards; nothing uses it.
const CHANGES: &str = "
    ALTER TABLE usage ADD COLUMN cause TEXT;
    ALTER TABLE keys ADD COLUMN budget {INT};
    ALTER TABLE keys ADD COLUMN budget_per TEXT;
    ALTER TABLE gateways ADD COLUMN head_seq {INT} NOT NULL DEFAULT 0;
    ALTER TABLE gateways ADD COLUMN head_hash {BLOB} NOT NULL DEFAULT {EMPTY};
    DROP INDEX usage_unsealed;
    CREATE INDEX usage_open ON usage (gateway, request_id) WHERE seq IS NULL;
    CREATE INDEX rollup_days ON usage_rollup (key_id, start) WHERE span = 86400";

/// The end of each chain: its newest row, or its anchor if retention has removed all rows.
const SET_HEADS: &str = "UPDATE gateways SET epoch = CASE WHEN epoch > 0 THEN epoch + 1 ELSE 0 END,
    head_seq = coalesce((SELECT seq FROM usage WHERE gateway = name AND seq IS NOT NULL ORDER BY seq DESC LIMIT 1),
        anchor_seq),
    head_hash = coalesce((SELECT hash FROM usage WHERE gateway = name AND seq IS NOT NULL ORDER BY seq DESC LIMIT 1),
        anchor_hash)";

const PLACE: &str = "UPDATE usage SET seq = $1, hash = $2 WHERE request_id = $3";

/// Runs in the transaction that notes the new version. `dialect` fills in the engine's types.
pub(super) fn upgrade(session: &dyn SqlSession, dialect: impl Fn(&str) -> String) -> Result<()> {
    log::info!("upgrading the database from version 8 to 9");
    dialect(CHANGES).split(';').try_for_each(|change| session.execute(change, &[]).map(drop))?;
    session.execute(SET_HEADS, &[])?;
    let heads = session.rows("SELECT name, head_seq, head_hash FROM gateways", &[], |mut row| {
        Ok((row.next::<String>()?, ChainLink { seq: row.next()?, hash: row.next()? }))
    })?;
    heads.into_iter().try_for_each(|(gateway, head)| seal(session, &gateway, head))
}

/// Gives the finished rows of a gateway their places, in the order of their ids.
fn seal(session: &dyn SqlSession, gateway: &str, mut head: ChainLink) -> Result<()> {
    let finished = format!(
        "SELECT {COLUMNS} FROM usage WHERE seq IS NULL AND gateway = $1 AND request_id > $2
         AND (status IS NOT NULL OR error_code IS NOT NULL) ORDER BY request_id LIMIT {ROWS_AT_ONCE}"
    );
    let (mut last, mut done, mut reported) = (String::new(), 0, Instant::now());
    loop {
        let rows = session.rows(&finished, &values![gateway, &last], read_row)?;
        let (mut sums, mut statements) = (Batch::default(), Vec::new());
        let mut last_used: BTreeMap<&str, i64> = BTreeMap::new();
        for row in &rows {
            head = head.following(row);
            statements.push(Statement::new(PLACE, values![head.seq, head.hash, &row.request_id]));
            sums.add(row);
            let used = last_used.entry(&row.key_id).or_insert(row.created);
            *used = row.created.max(*used);
        }
        sums.write(session)?;
        statements.extend(
            last_used.into_iter().map(|use_of| Statement::new(NOTE_USE, values![use_of.1, use_of.0])),
        );
        session.run(&bound(&statements), &mut |_, _| Ok(()))?;
        done += rows.len();
        if reported.elapsed() > PROGRESS_TIME {
            reported = Instant::now();
            log::info!("upgrading the database: {done} unsealed rows done");
        }
        match rows.last() {
            Some(row) if rows.len() == ROWS_AT_ONCE => last.clone_from(&row.request_id),
            _ => break,
        }
    }
    session.execute(MOVE_HEAD, &values![head.seq, head.hash, gateway]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ledger::tests::{row, write};
    use crate::store::tests::Temporary;
    use crate::store::{Access, Store};
    use crate::when;

    /// Takes away what the upgrade has added.
    fn back_to_8(store: &Store) {
        let version = match store.engine.sqlite() {
            Some(_) => "PRAGMA user_version = 8",
            None => "UPDATE schema_version SET version = 8, oldest_known = 8",
        };
        store.tamper(&format!("{}; {version}", include_str!("../../tests/back_to_8.sql")));
    }

    #[test]
    fn finished_rows_get_places_and_sums_and_open_rows_stay_open() {
        let mut temporary = Temporary::new();
        let upgrade = || Store::open(&temporary.database, Access::Serve).expect("an upgrade");
        let store = &mut temporary.store;
        store.join("a", "").expect("a start");
        (1..=3).for_each(|created| write(store, "x", "key_1", created, 200, Some(5)));
        back_to_8(store);
        drop(upgrade());
        store.begin_row(&row("open", "key_1", 2)).expect_err("it was fenced");
        back_to_8(store);
        let now = when::now();
        // More than are in memory at once, a second chain, open rows between them, and a chain whose rows were all removed.
        store.tamper(&format!(
            "INSERT INTO usage (request_id, key_id, key_name, created, status, error_code, total_tokens, duration_ms, gateway,
                 epoch) SELECT request_id || 'y', key_id, key_name, created, 502, 'inference_error', 7, 1.5, gateway, epoch
                 FROM usage;
             INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
                 SELECT request_id || 'z', key_id, key_name, created, gateway, epoch FROM usage WHERE seq IS NOT NULL;
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500)
                 INSERT INTO usage (request_id, key_id, key_name, created, status, total_tokens, runtime_ms)
                 SELECT 'r' || (9000 - i), 'key_2', 'b', {now} - i, 200, i, i FROM n;
             INSERT INTO gateways SELECT 'b', 3, '', '', 0, 7, anchor_hash, 0 FROM gateways WHERE name = ''"
        ));
        let mut store = upgrade();
        let found = store.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (2506, None));
        let gateways = "SELECT name, epoch, head_seq, (SELECT max(seq) FROM usage WHERE gateway = name),
             head_hash = coalesce((SELECT hash FROM usage WHERE gateway = name AND seq = head_seq), anchor_hash)
             FROM gateways ORDER BY name";
        let read = |mut row: crate::store::engine::Row| -> Result<(String, [i64; 2], Option<i64>, bool)> {
            Ok((row.next()?, [row.next()?, row.next()?], row.next()?, row.next()?))
        };
        assert_eq!(
            store.engine.read(|session| session.rows(gateways, &[], read)).expect("the gateways"),
            [
                (String::new(), [0, 2500], Some(2500), true),
                ("a".into(), [3, 6], Some(6), true),
                ("b".into(), [4, 7], None, true)
            ]
        );
        let in_order = "SELECT count(*) FROM usage WHERE gateway = '' AND request_id = 'r' || (6499 + seq)";
        assert_eq!(store.value::<i64>(in_order), 2500);
        for (span, of) in [(60, "key_2"), (3600, "key_2"), (86_400, "key_2"), (86_400, "key_1")] {
            let kept = format!(
                "SELECT CAST(sum(requests) * 10000000 + sum(total_tokens) AS BIGINT) FROM usage_rollup
                 WHERE span = {span} AND key_id = '{of}'"
            );
            let rows = format!(
                "SELECT CAST(count(*) * 10000000 + sum(total_tokens) AS BIGINT) FROM usage
                 WHERE seq IS NOT NULL AND key_id = '{of}'"
            );
            assert_eq!(store.value::<i64>(&kept), store.value::<i64>(&rows), "{span} {of}");
        }
        let last_used = "SELECT last_used FROM keys WHERE id = 'key_2'";
        assert_eq!(store.value::<i64>(last_used), now - 1);
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage WHERE seq IS NULL"), 3);
        assert_eq!(store.join("a", "").expect("a start"), 3, "the open ones");
    }
}
