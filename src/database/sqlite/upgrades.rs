//! Creates the tables, or brings them to the present version, in one transaction.

use rusqlite::{Connection, TransactionBehavior};

use super::connection::while_running;
use super::session::SqliteSession;
use crate::database::access::Access;
use crate::database::error::{DatabaseError, Result};
use crate::database::schema::Schema;
use crate::database::session::Session;
use crate::progress::Progress;

/// The steps of SQLite's virtual machine that an upgrade takes for a row of the ledger: measured,
/// and the same for 20,000 and for 100,000 rows.
const STEPS_PER_ROW: u64 = 47;

/// Returns whether it created the tables.
pub fn bring_up_to_date(
    connection: &mut Connection,
    schema: &Schema,
    access: Access,
    progress: &Progress,
) -> Result<bool> {
    // Nearly always there is nothing to do, and this query takes no lock.
    if is_current(connection, schema, access)? {
        return Ok(false);
    }
    show(connection, schema, progress)?;
    let changed = create_or_upgrade(connection, schema, access);
    connection.progress_handler(0, None::<fn() -> bool>)?;
    changed
}

fn create_or_upgrade(connection: &mut Connection, schema: &Schema, access: Access) -> Result<bool> {
    let behavior = match access {
        // It fails below.
        Access::Read => TransactionBehavior::Deferred,
        _ => TransactionBehavior::Immediate,
    };
    let transaction = connection.transaction_with_behavior(behavior)?;
    if is_current(&transaction, schema, access)? {
        return Ok(false);
    }
    let session = Session::Sqlite(SqliteSession::alone(&transaction));
    let found = version(&transaction)?;
    if found == 0 {
        create(&session, schema, access)?;
    } else {
        schema.upgrade(&session, found)?;
    }
    transaction.pragma_update(None, "user_version", schema.version)?;
    transaction.commit()?;
    Ok(found == 0)
}

/// Shows the progress of an upgrade, which consists of few statements.
fn show(connection: &mut Connection, schema: &Schema, progress: &Progress) -> Result<()> {
    if version(connection)? == 0 {
        return Ok(());
    }
    let rows = connection
        .query_row(schema.rows, [], |row| row.get::<_, i64>(0))?
        .max(0) as u64;
    let progress = progress.clone();
    progress.update("upgrading the database", 0, rows, "rows");
    while_running(connection, move |steps| {
        // The constant is no promise.
        let done = (steps / STEPS_PER_ROW).min(rows.saturating_sub(1));
        progress.update("upgrading the database", done, rows, "rows");
    })
}

/// Returns whether the database has the present version. If not, and it may not be upgraded, that
/// is an error.
fn is_current(connection: &Connection, schema: &Schema, access: Access) -> Result<bool> {
    match version(connection)? {
        0 => Ok(false),
        found => schema.is_current(access, found, found),
    }
}

pub fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Creates the tables of a new database. A database that has tables but no version belongs to
/// another program.
fn create(session: &Session, schema: &Schema, access: Access) -> Result<()> {
    if session.value::<i64>("SELECT count(*) FROM sqlite_schema", &[])? > 0 {
        return Err(DatabaseError::Damaged(
            "it is the database of another program".into(),
        ));
    }
    // A start that was interrupted has left a file without tables.
    if !access.may_create() {
        return Err(DatabaseError::Missing);
    }
    session.run_script(schema.tables)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::SCHEMA;
    use crate::mutex::lock;

    const BACK_TO_9: &str = include_str!("../../../tests/back_to_9.sql");

    fn memory() -> Connection {
        Connection::open_in_memory().expect("memory should be there")
    }

    /// A new database of an earlier version, with a key.
    fn version_9() -> Connection {
        let mut connection = memory();
        bring_up_to_date(
            &mut connection,
            &SCHEMA,
            Access::Create,
            &Progress::hidden(),
        )
        .expect("a new database");
        let key = "INSERT INTO keys (id, digest, name, permissions, created) VALUES ('a', x'', 'kept', '', 0)";
        connection
            .execute_batch(&format!("{BACK_TO_9}; PRAGMA user_version = 9; {key}"))
            .expect("version 9");
        connection
    }

    /// Every table and column with its type, and every index, in an order of their own.
    fn shape(connection: &Connection) -> Vec<String> {
        let mut statement = connection
            .prepare(
                "SELECT s.type || ' ' || s.name || ' ' || coalesce(c.cid || c.name || ' ' || c.type || c.\"notnull\" || c.pk, s.sql, '')
                 FROM sqlite_schema s LEFT JOIN pragma_table_xinfo(s.name) c ON s.type = 'table' ORDER BY 1",
            )
            .expect("the query should be good");
        let rows = statement
            .query_map([], |row| row.get(0))
            .expect("it should run");
        rows.collect::<rusqlite::Result<_>>()
            .expect("each row should be text")
    }

    #[test]
    fn a_new_database_and_an_upgraded_one_are_the_same() {
        let mut fresh = memory();
        assert!(matches!(
            bring_up_to_date(&mut fresh, &SCHEMA, Access::Existing, &Progress::hidden()),
            Err(DatabaseError::Missing)
        ));
        bring_up_to_date(&mut fresh, &SCHEMA, Access::Create, &Progress::hidden())
            .expect("a new database should be made");
        assert_eq!(version(&fresh).expect("a version"), SCHEMA.version);
        let expected = shape(&fresh);
        bring_up_to_date(&mut fresh, &SCHEMA, Access::Serve, &Progress::hidden())
            .expect("a second start should change nothing");
        assert_eq!(shape(&fresh), expected);
        let mut old = version_9();
        assert_ne!(shape(&old), expected);
        bring_up_to_date(&mut old, &SCHEMA, Access::Serve, &Progress::hidden())
            .expect("an upgrade");
        assert_eq!(shape(&old), expected);
        assert_eq!(version(&old).expect("a version"), SCHEMA.version);
        let name: String = old
            .query_row("SELECT name FROM keys", [], |row| row.get(0))
            .expect("the key");
        assert_eq!(name, "kept");
    }

    #[test]
    fn the_progress_of_an_upgrade_ends_with_its_rows() {
        let rows = 20_000;
        let mut old = version_9();
        let fill = format!(
            "UPDATE gateways SET head_seq = {rows};
             WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, gateway, seq) SELECT n, 'a', 'a', n, '', n FROM numbers"
        );
        old.execute_batch(&fill).expect("rows");
        let (progress, lines) = Progress::recorded();
        bring_up_to_date(&mut old, &SCHEMA, Access::Serve, &progress).expect("an upgrade");
        let percent: Vec<u64> = (lock(&lines).iter())
            .map(|line| {
                let (_, rest) = line
                    .split_once("upgrading the database: ")
                    .expect("the work");
                let (_, rest) = rest.split_once(" of 20,000 rows, ").expect("all rows");
                rest.split('%')
                    .next()
                    .and_then(|percent| percent.parse().ok())
                    .expect("a number")
            })
            .collect();
        assert!(percent.is_sorted() && percent.len() > 20, "{percent:?}");
        assert!(
            percent[0] == 0 && percent.last() > Some(&90),
            "STEPS_PER_ROW is wrong: {percent:?}"
        );
    }

    #[test]
    fn an_upgrade_that_fails_changes_nothing() {
        let mut old = version_9();
        // One of the last changes.
        old.execute_batch("CREATE TABLE moved (id)")
            .expect("a table");
        let before = shape(&old);
        assert!(bring_up_to_date(&mut old, &SCHEMA, Access::Serve, &Progress::hidden()).is_err());
        assert_eq!(
            (shape(&old), version(&old).expect("a version")),
            (before, 9)
        );
    }

    #[test]
    fn only_serve_upgrades_and_not_every_version() {
        let mut old = version_9();
        let before = shape(&old);
        for access in [Access::Create, Access::Existing] {
            let error = bring_up_to_date(&mut old, &SCHEMA, access, &Progress::hidden())
                .expect_err("it is older");
            assert!(
                matches!(error, DatabaseError::Older { found: 9, .. }),
                "{error}"
            );
        }
        assert_eq!(shape(&old), before);
        for (found, expected) in [
            (8, "no release had"),
            (1, "no release had"),
            (SCHEMA.version + 1, "knows versions up to"),
        ] {
            old.pragma_update(None, "user_version", found)
                .expect("a version");
            let error = bring_up_to_date(&mut old, &SCHEMA, Access::Serve, &Progress::hidden())
                .expect_err("it can't be used")
                .to_string();
            assert!(
                error.contains(&format!("has version {found}")) && error.contains(expected),
                "{error}"
            );
        }
        let mut other = memory();
        other
            .execute_batch("CREATE TABLE mine (x)")
            .expect("a table should be made");
        let error = bring_up_to_date(&mut other, &SCHEMA, Access::Serve, &Progress::hidden())
            .expect_err("it is not ours")
            .to_string();
        assert!(error.contains("another program"), "{error}");
    }
}
