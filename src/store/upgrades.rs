//! Brings a database to the present form, from none or from any earlier version, in one transaction.

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::StoreError;

/// The present form, for a new database.
const SCHEMA: &str = include_str!("schema.sql");

/// What changes from each version to the next: the first entry leads from version 1 to version 2. A change
/// to schema.sql comes with an entry here, and the tests hold the two ways against each other.
const UPGRADES: &[&str] = &[
    // Open rows are found by a mark and no longer by an index, which cost every request two changes.
    "DROP INDEX usage_by_seq;
     CREATE UNIQUE INDEX usage_by_seq ON usage (seq) WHERE seq IS NOT NULL;
     ALTER TABLE chain ADD COLUMN closed_before TEXT NOT NULL DEFAULT '';",
    CONSOLE,
];

/// The console's own tables. Days whose rows are gone are taken from the sums that were kept of them.
const CONSOLE: &str = "
     ALTER TABLE keys ADD COLUMN hint TEXT;
     CREATE TABLE console_password (
         id         INTEGER PRIMARY KEY CHECK (id = 1),
         salt       BLOB    NOT NULL,
         hash       BLOB    NOT NULL,
         memory_kib INTEGER NOT NULL,
         passes     INTEGER NOT NULL
     ) STRICT;
     CREATE TABLE console_tokens (
         digest  BLOB    NOT NULL PRIMARY KEY,
         kind    TEXT    NOT NULL,
         expires INTEGER NOT NULL
     ) STRICT, WITHOUT ROWID;
     CREATE TABLE usage_spans (
         span              INTEGER NOT NULL,
         start             INTEGER NOT NULL,
         key_id            TEXT    NOT NULL,
         status            INTEGER NOT NULL,
         error_code        TEXT    NOT NULL,
         requests          INTEGER NOT NULL,
         prompt_tokens     INTEGER NOT NULL,
         completion_tokens INTEGER NOT NULL,
         total_tokens      INTEGER NOT NULL,
         unmeasured        INTEGER NOT NULL,
         runtime_times     BLOB    NOT NULL,
         own_times         BLOB    NOT NULL,
         PRIMARY KEY (span, start, key_id, status, error_code)
     ) STRICT, WITHOUT ROWID;
     CREATE TABLE usage_failures (
         request_id TEXT NOT NULL PRIMARY KEY,
         key_id     TEXT NOT NULL,
         error_code TEXT NOT NULL
     ) STRICT, WITHOUT ROWID;
     CREATE TABLE usage_folded (
         id  INTEGER PRIMARY KEY CHECK (id = 1),
         seq INTEGER NOT NULL
     ) STRICT;
     INSERT INTO usage_folded VALUES (1, 0);
     INSERT INTO usage_spans
     SELECT 86400, day * 86400, key_id, status, error_code, sum(requests), sum(prompt_tokens), sum(completion_tokens),
         sum(total_tokens), sum(unmeasured), x'', x''
     FROM usage_daily WHERE (day + 1) * 86400 <= (SELECT kept_since FROM chain) GROUP BY day, key_id, status, error_code;
";

pub(super) fn bring_up_to_date(connection: &mut Connection) -> Result<(), StoreError> {
    upgrade(connection, SCHEMA, UPGRADES)
}

fn upgrade(connection: &mut Connection, schema: &str, upgrades: &[&str]) -> Result<(), StoreError> {
    let present = 1 + upgrades.len() as i64;
    // Nearly always there is nothing to do: that is found out without locking others out.
    if version(connection)? == present {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    match version(&transaction)? {
        0 => make(&transaction, schema)?,
        found if found > present => return Err(StoreError::Newer { found, known: present }),
        found => {
            for change in &upgrades[found as usize - 1..] {
                transaction.execute_batch(change)?;
            }
        }
    }
    transaction.pragma_update(None, "user_version", present)?;
    transaction.commit()?;
    Ok(())
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Makes the tables of a new database. One that has tables but no version is somebody else's.
fn make(transaction: &Transaction, schema: &str) -> Result<(), StoreError> {
    let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 {
        return Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_NOTADB),
            Some("it is the database of another program".into()),
        )
        .into());
    }
    Ok(transaction.execute_batch(schema)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Connection {
        Connection::open_in_memory().expect("memory should be there")
    }

    /// Every table, index and column with its type, in an order of their own.
    fn shape(connection: &Connection) -> Vec<String> {
        let mut statement = connection
            .prepare(
                "SELECT s.type || ' ' || s.name || ' ' || coalesce(c.name || ' ' || c.type || c.\"notnull\" || c.pk, '')
                 FROM sqlite_schema s LEFT JOIN pragma_table_xinfo(s.name) c ORDER BY 1",
            )
            .expect("the query should be good");
        let rows = statement.query_map([], |row| row.get(0)).expect("it should run");
        rows.collect::<rusqlite::Result<_>>().expect("each row should be text")
    }

    const FIRST: &str = "CREATE TABLE a (x INTEGER) STRICT;";
    const THIRD: &str = "CREATE TABLE a (x INTEGER, y TEXT) STRICT; CREATE TABLE b (z BLOB) STRICT;";
    const CHANGES: [&str; 2] = ["ALTER TABLE a ADD COLUMN y TEXT", "CREATE TABLE b (z BLOB) STRICT"];

    #[test]
    fn any_earlier_version_becomes_what_a_new_one_is() {
        let mut fresh = memory();
        upgrade(&mut fresh, THIRD, &CHANGES).expect("a new database should be made");
        for changes in 0..=2 {
            let mut old = memory();
            upgrade(&mut old, FIRST, &[]).expect("the first version should be made");
            old.execute("INSERT INTO a (x) VALUES (7)", []).expect("a row should be taken");
            upgrade(&mut old, FIRST, &CHANGES[..changes]).expect("a step should be taken");
            upgrade(&mut old, THIRD, &CHANGES).expect("the rest should be taken");
            assert_eq!(shape(&old), shape(&fresh), "after {changes} changes");
            assert_eq!(version(&old).expect("a version"), 3);
            let kept: i64 = old.query_row("SELECT x FROM a", [], |row| row.get(0)).expect("the row");
            assert_eq!(kept, 7);
        }
    }

    #[test]
    fn the_present_schema_is_reached_by_its_upgrades() {
        let mut fresh = memory();
        bring_up_to_date(&mut fresh).expect("a new database should be made");
        assert_eq!(version(&fresh).expect("a version"), 1 + UPGRADES.len() as i64);
        let before = shape(&fresh);
        assert!(before.iter().any(|line| line.starts_with("table usage request_id TEXT")), "{before:?}");
        bring_up_to_date(&mut fresh).expect("twice is as good as once");
        assert_eq!(shape(&fresh), before);
    }

    #[test]
    fn an_upgrade_that_fails_changes_nothing() {
        let mut old = memory();
        upgrade(&mut old, FIRST, &[]).expect("the first version should be made");
        let before = shape(&old);
        assert!(upgrade(&mut old, THIRD, &[CHANGES[0], "CREATE TABLE a (again)"]).is_err());
        assert_eq!((shape(&old), version(&old).expect("a version")), (before, 1));
    }

    #[test]
    fn a_later_version_and_a_strangers_database_are_refused() {
        let mut later = memory();
        upgrade(&mut later, THIRD, &CHANGES).expect("a new database should be made");
        assert!(matches!(upgrade(&mut later, FIRST, &[]), Err(StoreError::Newer { found: 3, known: 1 })));
        let mut other = memory();
        other.execute_batch("CREATE TABLE mine (x)").expect("a table should be made");
        let error = bring_up_to_date(&mut other).expect_err("it is not ours").to_string();
        assert!(error.contains("another program"), "{error}");
    }
}
