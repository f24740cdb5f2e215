//! Creates the tables, or brings them to the present version, in one transaction. An advisory lock serializes the
//! programs that start at the same time.
//!
//! Changes only add: a program that is older than the database may use it, as long as it knows the version that the
//! database names as the oldest. So gateways are upgraded one after the other while the rest serves.

use std::time::{Duration, Instant};

use super::super::super::StoreError;
use super::super::{IfMissing, SCHEMA, SCHEMA_VERSION};
use super::connection::Connection;

/// What reading every row of a large table may take.
const UPGRADE_TIME: Duration = Duration::from_secs(3600);

/// The first of the two numbers of every advisory lock; any that other programs in the same database do not use.
pub(super) const LOCK: i32 = 0x6164_7269;

/// Until the transaction ends, the others remove no old rows.
pub const TRY_RETENTION_LOCK: &str = "SELECT pg_try_advisory_xact_lock(1633972841, 2)";

/// The versions below this one were never on PostgreSQL.
const FIRST_VERSION: i64 = 8;

/// What leads from `FIRST_VERSION` to the next, and so on.
const UPGRADES: &[&str] = &[];
const _: () = assert!(FIRST_VERSION + UPGRADES.len() as i64 == SCHEMA_VERSION, "a version needs its upgrade");

/// The oldest version that a program has to know to use the database.
const OLDEST_KNOWN: i64 = FIRST_VERSION;

const VERSION_TABLE: &str = "CREATE TABLE schema_version (
    id           BIGINT PRIMARY KEY CHECK (id = 1),
    version      BIGINT NOT NULL,
    oldest_known BIGINT NOT NULL
)";

pub(super) fn bring_up_to_date(connection: &mut Connection, if_missing: IfMissing) -> Result<(), StoreError> {
    let deadline = Instant::now() + UPGRADE_TIME;
    if if_missing == IfMissing::Fail && version(connection, deadline)?.is_none() {
        return Err(StoreError::Missing);
    }
    upgrade(connection, &schema(), FIRST_VERSION, UPGRADES, OLDEST_KNOWN)
}

/// The current schema in PostgreSQL's types. Text is ordered by its bytes, as in SQLite.
fn schema() -> String {
    let schema = [
        ("{INT}", "BIGINT"),
        ("{REAL}", "DOUBLE PRECISION"),
        ("{BLOB}", "BYTEA"),
        ("{STRICT}", ""),
        ("{CLUSTERED}", ""),
        ("TEXT", "TEXT COLLATE \"C\""),
    ]
    .iter()
    .fold(SCHEMA.to_owned(), |schema, (name, meaning)| schema.replace(name, meaning));
    schema + "INSERT INTO gateways VALUES ('', 0, '', '', 0, 0, decode(repeat('00', 32), 'hex'), 0);"
}

/// Begins a transaction and creates the tables in it.
pub(super) fn begin_and_create(connection: &mut Connection) -> Result<(), StoreError> {
    let deadline = Instant::now() + UPGRADE_TIME;
    begin(connection, deadline)?;
    if version(connection, deadline)?.is_some() {
        return Err(StoreError::Other(
            "it has a ledger already. If a move was made to it before, that move is complete; else create an \
             empty database"
                .into(),
        ));
    }
    let changes = creation(connection, &schema(), deadline)?;
    connection.run_text(&changes, deadline)?;
    note_version(connection, SCHEMA_VERSION, OLDEST_KNOWN, deadline)
}

/// Begins a transaction in which no other program can change the schema.
fn begin(connection: &mut Connection, deadline: Instant) -> Result<(), StoreError> {
    Ok(connection.run_text(&format!("BEGIN; SELECT pg_advisory_xact_lock({LOCK}, 1)"), deadline)?)
}

/// The statements that make the tables, if there are none of another program.
fn creation(connection: &mut Connection, schema: &str, deadline: Instant) -> Result<String, StoreError> {
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()";
    if number(connection, tables, deadline)? > 0 {
        return Err(StoreError::Other(
            "it has tables of another program: create a database for this one".into(),
        ));
    }
    Ok(format!("{VERSION_TABLE}; INSERT INTO schema_version VALUES (1, 0, 0); {schema}"))
}

fn note_version(
    connection: &mut Connection,
    version: i64,
    oldest_known: i64,
    deadline: Instant,
) -> Result<(), StoreError> {
    let note = format!("UPDATE schema_version SET version = {version}, oldest_known = {oldest_known}");
    Ok(connection.run_text(&note, deadline)?)
}

fn upgrade(
    connection: &mut Connection,
    schema: &str,
    first: i64,
    upgrades: &[&str],
    oldest_known: i64,
) -> Result<(), StoreError> {
    let known = first + upgrades.len() as i64;
    let deadline = Instant::now() + UPGRADE_TIME;
    // Nearly always there is nothing to do, and this query takes no lock.
    if is_usable(version(connection, deadline)?, known)? {
        return Ok(());
    }
    begin(connection, deadline)?;
    let found = version(connection, deadline)?;
    let changes = match found {
        _ if is_usable(found, known)? => return Ok(connection.run_text("ROLLBACK", deadline)?),
        Some((found, _)) if found < first => {
            return Err(StoreError::Other(format!(
                "its version {found} was never released: create a new database"
            )));
        }
        Some((found, _)) => upgrades[(found - first) as usize..].join(";"),
        None => creation(connection, schema, deadline)?,
    };
    connection.run_text(&changes, deadline)?;
    note_version(connection, known, oldest_known, deadline)?;
    connection.run_text("COMMIT", deadline)?;
    if found.is_none() {
        log::info!("created the tables in a new database");
    }
    Ok(())
}

/// Whether the program can use the database as it is. A database that asks for a later program is an error.
fn is_usable(found: Option<(i64, i64)>, known: i64) -> Result<bool, StoreError> {
    match found {
        Some((version, oldest_known)) if oldest_known > known => {
            Err(StoreError::Newer { found: version, known })
        }
        Some((version, _)) => Ok(version >= known),
        None => Ok(false),
    }
}

/// The version and the oldest that a program has to know; `None` if there are no tables yet.
fn version(connection: &mut Connection, deadline: Instant) -> Result<Option<(i64, i64)>, StoreError> {
    let exists =
        "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'schema_version'";
    if number(connection, exists, deadline)? == 0 {
        return Ok(None);
    }
    let found = number(connection, "SELECT version FROM schema_version", deadline)?;
    Ok(Some((found, number(connection, "SELECT oldest_known FROM schema_version", deadline)?)))
}

fn number(connection: &mut Connection, statement: &str, deadline: Instant) -> Result<i64, StoreError> {
    let mut found = Err(StoreError::NoRow);
    connection.run(None, &[(statement, &[])], deadline, &mut |mut row| found = row.next())?;
    found
}

#[cfg(all(test, feature = "test-postgres"))]
mod tests {
    use std::thread;

    use super::super::super::super::test_server::PostgresServer;
    use super::super::uri::DatabaseUri;
    use super::*;

    const FIRST: &str = "CREATE TABLE a (x BIGINT);";
    const CHANGES: [&str; 2] = ["ALTER TABLE a ADD COLUMN y TEXT", "CREATE TABLE b (z BYTEA)"];

    fn connect(uri: &str) -> Connection {
        let uri = DatabaseUri::parse(uri).expect("a good URI");
        Connection::open(&uri, &uri.hosts[0], None, soon()).expect("a connection")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn upgrades_run_once_however_many_start_at_the_same_time() {
        let uri = PostgresServer::shared().database();
        let start = |changes: usize| {
            let bring =
                |mut connection: Connection| upgrade(&mut connection, FIRST, 7, &CHANGES[..changes], 7);
            thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(|| bring(connect(&uri)))).collect();
                all.into_iter().for_each(|one| one.join().expect("no panic").expect("an upgrade"));
            });
            version(&mut connect(&uri), soon()).expect("a look")
        };
        assert_eq!(start(0), Some((7, 7)));
        connect(&uri).run_text("INSERT INTO a VALUES (5)", soon()).expect("a row");
        assert_eq!(start(2), Some((9, 7)));
        assert_eq!(start(1), Some((9, 7)), "an older program changes nothing");
        let kept = "SELECT count(*) FROM a, (SELECT count(*) FROM b) AS b WHERE x = 5 AND y IS NULL";
        assert_eq!(number(&mut connect(&uri), kept, soon()).expect("the row"), 1);
    }

    #[test]
    fn a_failing_upgrade_changes_nothing_and_a_program_that_is_too_old_is_refused() {
        let uri = PostgresServer::shared().database();
        let run = |changes: &[&str], oldest| upgrade(&mut connect(&uri), FIRST, 7, changes, oldest);
        run(&[], 7).expect("a new database");
        assert!(run(&[CHANGES[0], "CREATE TABLE a (again BIGINT)"], 8).is_err());
        assert_eq!(version(&mut connect(&uri), soon()).expect("a look"), Some((7, 7)));
        run(&CHANGES, 8).expect("an upgrade");
        run(&CHANGES[..1], 8).expect("it knows enough");
        assert!(matches!(run(&[], 7), Err(StoreError::Newer { found: 9, known: 7 })));
    }

    #[test]
    fn only_a_command_that_may_creates_the_tables() {
        let uri = PostgresServer::shared().database();
        let open = |if_missing| bring_up_to_date(&mut connect(&uri), if_missing);
        for _ in 0..2 {
            assert!(matches!(open(IfMissing::Fail), Err(StoreError::Missing)));
        }
        open(IfMissing::Create).expect("a new database");
        open(IfMissing::Fail).expect("it is there");
    }

    #[test]
    fn tables_of_another_program_are_left_alone() {
        let uri = PostgresServer::shared().database();
        connect(&uri).run_text("CREATE TABLE mine (x BIGINT)", soon()).expect("a table");
        let error =
            bring_up_to_date(&mut connect(&uri), IfMissing::Create).expect_err("it is not ours").to_string();
        assert!(error.contains("another program"), "{error}");
    }
}
