//! Brings a database to the present version, from none or from any earlier one, in one transaction.

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::super::super::StoreError;
use super::super::SCHEMA;
use super::version_5;

/// A step from one version to the next.
#[derive(Clone, Copy)]
enum Change {
    Sql(&'static str),
    Code(fn(&Connection) -> Result<(), StoreError>),
}

/// The first entry leads from version 1 to version 2. A change to schema.sql comes with an entry here, and the tests
/// compare the two ways.
const UPGRADES: &[Change] = &[
    Change::Sql(
        "DROP INDEX usage_by_seq;
         CREATE UNIQUE INDEX usage_by_seq ON usage (seq) WHERE seq IS NOT NULL;
         ALTER TABLE chain ADD COLUMN closed_before TEXT NOT NULL DEFAULT '';",
    ),
    Change::Sql(CONSOLE),
    Change::Sql(SEARCH),
    Change::Code(version_5::upgrade),
    Change::Sql("ALTER TABLE keys ADD COLUMN concurrent INTEGER"),
    Change::Sql(GATEWAYS),
    Change::Sql(AUDIT),
];

const AUDIT: &str = "
     CREATE TABLE audit (
         id       TEXT    NOT NULL PRIMARY KEY,
         created  INTEGER NOT NULL,
         action   TEXT    NOT NULL,
         via      TEXT    NOT NULL,
         actor    TEXT    NOT NULL,
         details  TEXT    NOT NULL,
         times    INTEGER NOT NULL,
         key_id   TEXT,
         key_name TEXT
     ) STRICT, WITHOUT ROWID;
";

/// The console's own tables.
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

/// The columns for Search.
const SEARCH: &str = "
     ALTER TABLE usage ADD COLUMN search_reason TEXT;
     ALTER TABLE usage ADD COLUMN search_results INTEGER;
     ALTER TABLE usage ADD COLUMN search_ms REAL;
";

/// The columns and the table for gateways. What is there belongs to the one without a name. The rollup of version 5 may have
/// the column already: see version_5.rs.
const GATEWAYS: &str = "
     ALTER TABLE usage ADD COLUMN gateway TEXT NOT NULL DEFAULT '';
     ALTER TABLE usage ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
     DROP INDEX usage_by_seq;
     CREATE UNIQUE INDEX usage_by_seq ON usage (gateway, seq) WHERE seq IS NOT NULL;
     DROP INDEX usage_unsealed;
     CREATE INDEX usage_unsealed ON usage (seq, gateway, request_id) WHERE seq IS NULL;
     ALTER TABLE usage_rollup RENAME TO old_rollup;
     {ROLLUP}
     INSERT INTO usage_rollup SELECT span, start, key_id, key_name, status, error_code, '', requests, prompt_tokens,
         completion_tokens, total_tokens, unmeasured, runtime_times, own_times FROM old_rollup;
     DROP TABLE old_rollup;
     CREATE TABLE gateways (
         name        TEXT    NOT NULL PRIMARY KEY,
         epoch       INTEGER NOT NULL,
         version     TEXT    NOT NULL,
         address     TEXT    NOT NULL,
         last_seen   INTEGER NOT NULL,
         anchor_seq  INTEGER NOT NULL,
         anchor_hash BLOB    NOT NULL,
         kept_since  INTEGER NOT NULL
     ) STRICT, WITHOUT ROWID;
     INSERT INTO gateways SELECT '', 0, '', '', 0, anchor_seq, anchor_hash, kept_since FROM chain;
     DROP TABLE chain;
";

pub(super) fn bring_up_to_date(connection: &mut Connection) -> Result<(), StoreError> {
    upgrade(connection, &schema(), UPGRADES)
}

/// The schema in SQLite's terms.
fn schema() -> String {
    [
        ("{INT}", "INTEGER"),
        ("{REAL}", "REAL"),
        ("{BLOB}", "BLOB"),
        ("{STRICT}", "STRICT"),
        ("{CLUSTERED}", "STRICT, WITHOUT ROWID"),
    ]
    .iter()
    .fold(SCHEMA.to_owned(), |schema, (name, meaning)| schema.replace(name, meaning))
        + "INSERT INTO gateways VALUES ('', 0, '', '', 0, 0, zeroblob(32), 0);"
}

fn upgrade(connection: &mut Connection, schema: &str, upgrades: &[Change]) -> Result<(), StoreError> {
    let present = 1 + upgrades.len() as i64;
    // Nearly always there is nothing to do, and this query takes no lock.
    if version(connection)? == present {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found = version(&transaction)?;
    match found {
        0 => make(&transaction, schema)?,
        _ if found > present => return Err(StoreError::Newer { found, known: present }),
        _ => {
            for change in &upgrades[found as usize - 1..] {
                match change {
                    Change::Sql(statements) => {
                        transaction.execute_batch(&statements.replace("{ROLLUP}", version_5::CREATE))?;
                    }
                    Change::Code(run) => run(&transaction)?,
                }
            }
        }
    }
    transaction.pragma_update(None, "user_version", present)?;
    transaction.commit()?;
    if found == 0 {
        log::info!("created the database {}", connection.path().unwrap_or_default());
    }
    Ok(())
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Creates the tables of a new database. A database that has tables but no version belongs to another program.
fn make(transaction: &Transaction, schema: &str) -> Result<(), StoreError> {
    let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 {
        return Err(StoreError::Damaged("it is the database of another program".into()));
    }
    Ok(transaction.execute_batch(schema)?)
}

#[cfg(test)]
mod tests {
    use super::super::super::SCHEMA_VERSION;
    use super::*;

    fn memory() -> Connection {
        Connection::open_in_memory().expect("memory should be there")
    }

    /// Every table and column with its type, and every index, in an order of their own.
    fn shape(connection: &Connection) -> Vec<String> {
        let mut statement = connection
            .prepare(
                "SELECT s.type || ' ' || s.name || ' ' || coalesce(c.name || ' ' || c.type || c.\"notnull\" || c.pk, s.sql, '')
                 FROM sqlite_schema s LEFT JOIN pragma_table_xinfo(s.name) c ORDER BY 1",
            )
            .expect("the query should be good");
        let rows = statement.query_map([], |row| row.get(0)).expect("it should run");
        rows.collect::<rusqlite::Result<_>>().expect("each row should be text")
    }

    /// The tables of version 1.
    const VERSION_1: &str = "
        CREATE TABLE keys (id TEXT NOT NULL PRIMARY KEY, digest BLOB NOT NULL UNIQUE, name TEXT NOT NULL,
            permissions TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER, last_used INTEGER, revoked INTEGER) STRICT;
        CREATE TABLE usage (request_id TEXT NOT NULL PRIMARY KEY, key_id TEXT NOT NULL, key_name TEXT NOT NULL,
            created INTEGER NOT NULL, status INTEGER, error_code TEXT, prompt_tokens INTEGER, completion_tokens INTEGER,
            total_tokens INTEGER, duration_ms REAL, queue_ms REAL, runtime_ms REAL, grounded INTEGER NOT NULL DEFAULT 0,
            seq INTEGER, hash BLOB) STRICT, WITHOUT ROWID;
        CREATE INDEX usage_by_key ON usage (key_id);
        CREATE UNIQUE INDEX usage_by_seq ON usage (seq);
        CREATE TABLE usage_daily (day INTEGER NOT NULL, key_id TEXT NOT NULL, key_name TEXT NOT NULL,
            status INTEGER NOT NULL, error_code TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL, total_tokens INTEGER NOT NULL, unmeasured INTEGER NOT NULL,
            PRIMARY KEY (day, key_id, key_name, status, error_code)) STRICT, WITHOUT ROWID;
        CREATE TABLE chain (id INTEGER PRIMARY KEY CHECK (id = 1), anchor_seq INTEGER NOT NULL,
            anchor_hash BLOB NOT NULL, kept_since INTEGER NOT NULL) STRICT;
        INSERT INTO chain VALUES (1, 0, zeroblob(32), 0);";

    /// Makes an empty database of an earlier version.
    fn make_version(connection: &mut Connection, version: usize) {
        upgrade(connection, VERSION_1, &[]).expect("version 1 should be made");
        upgrade(connection, VERSION_1, &UPGRADES[..version - 1]).expect("the steps should be taken");
    }

    #[test]
    fn the_present_schema_is_reached_from_every_version() {
        let mut fresh = memory();
        bring_up_to_date(&mut fresh).expect("a new database should be made");
        assert_eq!(version(&fresh).expect("a version"), SCHEMA_VERSION);
        let expected = shape(&fresh);
        bring_up_to_date(&mut fresh).expect("a second start should change nothing");
        assert_eq!(shape(&fresh), expected);
        for version in 1..=UPGRADES.len() {
            let mut old = memory();
            make_version(&mut old, version);
            let insert =
                "INSERT INTO keys (id, digest, name, permissions, created) VALUES ('a', x'', 'kept', '', 0)";
            old.execute(insert, []).expect("a key");
            bring_up_to_date(&mut old).expect("an upgrade");
            assert_eq!(shape(&old), expected, "from version {version}");
            let name: String = old.query_row("SELECT name FROM keys", [], |row| row.get(0)).expect("the key");
            assert_eq!(name, "kept");
        }
    }

    #[test]
    fn an_upgrade_that_fails_changes_nothing() {
        let mut old = memory();
        make_version(&mut old, 1);
        let before = shape(&old);
        let failing = [UPGRADES[0], Change::Sql("CREATE TABLE keys (again)")];
        assert!(upgrade(&mut old, VERSION_1, &failing).is_err());
        assert_eq!((shape(&old), version(&old).expect("a version")), (before, 1));
    }

    #[test]
    fn a_later_version_and_a_strangers_database_are_refused() {
        let mut later = memory();
        make_version(&mut later, 3);
        let error = upgrade(&mut later, VERSION_1, &[]).expect_err("it is later");
        assert!(matches!(error, StoreError::Newer { found: 3, known: 1 }));
        let mut other = memory();
        other.execute_batch("CREATE TABLE mine (x)").expect("a table should be made");
        let error = bring_up_to_date(&mut other).expect_err("it is not ours").to_string();
        assert!(error.contains("another program"), "{error}");
    }
}
