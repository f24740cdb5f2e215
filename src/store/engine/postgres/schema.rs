//! Creates the tables, or brings them to the present version, in one transaction. An advisory lock serializes the
//! programs that start at the same time.
//!
//! A program that is older than the database may use it, as long as it knows the version that the database names as the
//! oldest. If a version only adds, gateways are upgraded one after the other while the rest serves. Version 9 does more.

use std::time::{Duration, Instant};

use super::PgSession;
use super::pool::Pooled;
use super::protocol::PgConnection;
use crate::store::engine::{Access, SCHEMA, SCHEMA_VERSION, SqlSession};
use crate::store::{StoreError, version_9};

/// The timeout for reading every row of a large table.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The first of the two numbers of every advisory lock; any that other programs in the same database do not use.
pub(super) const LOCK: i32 = 0x6164_7269;

/// The oldest version that a program has to know to use the database.
const OLDEST_KNOWN: i64 = 9;

const VERSION_TABLE: &str = "CREATE TABLE schema_version (
    id           BIGINT PRIMARY KEY CHECK (id = 1),
    version      BIGINT NOT NULL,
    oldest_known BIGINT NOT NULL
)";

/// Returns whether the tables can be used as they are. Creates them if there are none and `access` allows it; if they are older and
/// may not be upgraded, that is an error.
pub(super) fn is_current(connection: &mut PgConnection, access: Access) -> Result<bool, StoreError> {
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    // Nearly always there is nothing to do, and this query takes no lock.
    if let Some(found) = version(connection, deadline)? {
        return is_usable(found, access);
    }
    if !access.may_create() {
        return Err(StoreError::Missing);
    }
    begin(connection, deadline)?;
    if let Some(found) = version(connection, deadline)? {
        connection.run_text("ROLLBACK", deadline)?;
        return is_usable(found, access);
    }
    create(connection, deadline)?;
    connection.run_text("COMMIT", deadline)?;
    log::info!("created the tables in a new database");
    Ok(true)
}

/// Brings the tables to the present version.
pub(super) fn upgrade(mut pooled: Pooled) -> Result<(), StoreError> {
    let (connection, deadline) = (pooled.connection(), Instant::now() + UPGRADE_TIMEOUT);
    begin(connection, deadline)?;
    // Another gateway may have done it meanwhile.
    if version(connection, deadline)?.map_or(Ok(false), |found| is_usable(found, Access::Serve))? {
        return Ok(connection.run_text("ROLLBACK", deadline)?);
    }
    let statements = PgSession::begun(pooled);
    let session: &dyn SqlSession = &statements;
    // In the order in which a gateway that still runs locks them: sealing begins with its own row.
    session.execute("LOCK TABLE gateways, keys, usage, usage_rollup IN ACCESS EXCLUSIVE MODE", &[])?;
    version_9::upgrade(session, dialect)?;
    session.execute(
        "ALTER TABLE gateways ALTER COLUMN head_seq DROP DEFAULT, ALTER COLUMN head_hash DROP DEFAULT",
        &[],
    )?;
    let note = format!("UPDATE schema_version SET version = {SCHEMA_VERSION}, oldest_known = {OLDEST_KNOWN}");
    session.execute(&note, &[])?;
    statements.commit(&[])
}

/// Statements in PostgreSQL's terms. Text is ordered by its bytes, as in SQLite.
fn dialect(statements: &str) -> String {
    [
        ("{INT}", "BIGINT"),
        ("{REAL}", "DOUBLE PRECISION"),
        ("{BLOB}", "BYTEA"),
        ("{EMPTY}", "''"),
        ("{STRICT}", ""),
        ("{CLUSTERED}", ""),
        ("TEXT", "TEXT COLLATE \"C\""),
    ]
    .iter()
    .fold(statements.to_owned(), |statements, (name, meaning)| statements.replace(name, meaning))
}

/// Begins a transaction and creates the tables in it.
pub(super) fn begin_and_create(connection: &mut PgConnection) -> Result<(), StoreError> {
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    begin(connection, deadline)?;
    if version(connection, deadline)?.is_some() {
        return Err(StoreError::Other(
            "it has a ledger already. If a move was made to it before, that move is complete; else create an \
             empty database"
                .into(),
        ));
    }
    create(connection, deadline)
}

/// Begins a transaction in which no other program can change the schema.
fn begin(connection: &mut PgConnection, deadline: Instant) -> Result<(), StoreError> {
    Ok(connection.run_text(&format!("BEGIN; SELECT pg_advisory_xact_lock({LOCK}, 1)"), deadline)?)
}

/// Creates the tables, if there are none of another program.
fn create(connection: &mut PgConnection, deadline: Instant) -> Result<(), StoreError> {
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()";
    if number(connection, tables, deadline)? > 0 {
        return Err(StoreError::Other(
            "it has tables of another program: create a database for this one".into(),
        ));
    }
    let zero = "decode(repeat('00', 32), 'hex')";
    let changes = format!(
        "{VERSION_TABLE}; INSERT INTO schema_version VALUES (1, {SCHEMA_VERSION}, {OLDEST_KNOWN}); {}
         INSERT INTO gateways VALUES ('', 0, '', '', 0, 0, {zero}, 0, 0, {zero});",
        dialect(SCHEMA)
    );
    Ok(connection.run_text(&changes, deadline)?)
}

/// Returns whether the program can use the database as it is.
fn is_usable((found, oldest_known): (i64, i64), access: Access) -> Result<bool, StoreError> {
    match found {
        _ if oldest_known > SCHEMA_VERSION => Err(StoreError::Newer { found, known: SCHEMA_VERSION }),
        SCHEMA_VERSION.. => Ok(true),
        _ => access.check_upgrade(found).map(|()| false),
    }
}

/// The version and the oldest that a program has to know; `None` if there are no tables yet.
fn version(connection: &mut PgConnection, deadline: Instant) -> Result<Option<(i64, i64)>, StoreError> {
    let exists =
        "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'schema_version'";
    if number(connection, exists, deadline)? == 0 {
        return Ok(None);
    }
    let found = number(connection, "SELECT version FROM schema_version", deadline)?;
    Ok(Some((found, number(connection, "SELECT oldest_known FROM schema_version", deadline)?)))
}

fn number(connection: &mut PgConnection, statement: &str, deadline: Instant) -> Result<i64, StoreError> {
    let mut found = Err(StoreError::NoRow);
    connection.run(None, &[(statement, &[])], deadline, &mut |mut row| found = row.next())?;
    found
}

#[cfg(all(test, feature = "test-postgres"))]
mod tests {
    use std::thread;

    use super::*;
    use crate::store::engine::postgres::Postgres;
    use crate::store::engine::postgres::uri::DatabaseUri;
    use crate::store::test_server::PostgresServer;

    const BACK_TO_8: &str = include_str!("../../../../tests/back_to_8.sql");

    fn connect(uri: &str) -> PgConnection {
        let uri = DatabaseUri::parse(uri).expect("a good URI");
        PgConnection::open(&uri, &uri.hosts[0], None, soon()).expect("a connection")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn open(uri: &str, access: Access) -> Result<(), StoreError> {
        Postgres::open(&DatabaseUri::parse(uri).expect("a good URI"), 1, access).map(drop)
    }

    fn run(uri: &str, statements: &str) {
        connect(uri).run_text(statements, soon()).expect("good statements");
    }

    fn versions(uri: &str) -> Option<(i64, i64)> {
        version(&mut connect(uri), soon()).expect("a look")
    }

    /// A database of version 8 with a gateway that has served.
    fn version_8() -> String {
        let uri = PostgresServer::shared().database();
        open(&uri, Access::Create).expect("a new database");
        run(
            &uri,
            &format!(
                "{BACK_TO_8}; UPDATE schema_version SET version = 8, oldest_known = 8; UPDATE gateways SET epoch = 5"
            ),
        );
        uri
    }

    /// Every column with its type, in its place, and every index.
    fn shape(uri: &str) -> Vec<String> {
        // Dropped columns leave gaps in ordinal_position.
        let statement = "SELECT table_name || row_number() OVER (PARTITION BY table_name ORDER BY ordinal_position)
            || column_name || data_type || is_nullable || coalesce(collation_name, '') || coalesce(column_default, '')
            FROM information_schema.columns WHERE table_schema = 'public'
            UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1";
        let mut found = Vec::new();
        connect(uri)
            .run(None, &[(statement, &[])], soon(), &mut |mut row| found.push(row.next().expect("text")))
            .expect("a good statement");
        found
    }

    #[test]
    fn an_upgrade_runs_once_however_many_start_at_the_same_time() {
        let uri = version_8();
        let start = || {
            thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&uri, Access::Serve))).collect();
                all.into_iter().for_each(|one| one.join().expect("no panic").expect("an upgrade"));
            });
        };
        start();
        start();
        assert_eq!(versions(&uri), Some((SCHEMA_VERSION, OLDEST_KNOWN)));
        assert_eq!(number(&mut connect(&uri), "SELECT epoch FROM gateways", soon()).expect("a row"), 6);
        let new = PostgresServer::shared().database();
        open(&new, Access::Create).expect("a new database");
        assert_eq!(shape(&uri), shape(&new));
    }

    #[test]
    fn a_failing_upgrade_changes_nothing() {
        let uri = version_8();
        run(&uri, "CREATE INDEX rollup_days ON keys (id)");
        let before = shape(&uri);
        assert!(open(&uri, Access::Serve).is_err());
        assert_eq!((versions(&uri), shape(&uri)), (Some((8, 8)), before));
    }

    #[test]
    fn only_serve_upgrades_and_a_program_that_is_too_old_is_refused() {
        let uri = version_8();
        for access in [Access::Create, Access::Existing] {
            assert!(matches!(open(&uri, access), Err(StoreError::Older { found: 8, known: SCHEMA_VERSION })));
        }
        assert_eq!(versions(&uri), Some((8, 8)));
        open(&uri, Access::Serve).expect("an upgrade");
        run(&uri, "UPDATE schema_version SET version = version + 1");
        open(&uri, Access::Existing).expect("it knows enough");
        run(&uri, "UPDATE schema_version SET oldest_known = version");
        assert!(matches!(
            open(&uri, Access::Serve),
            Err(StoreError::Newer { found: 10, known: SCHEMA_VERSION })
        ));
        run(&uri, "UPDATE schema_version SET version = 7, oldest_known = 7");
        assert!(matches!(open(&uri, Access::Serve), Err(StoreError::Unreleased(7))));
    }

    #[test]
    fn only_a_command_that_may_creates_the_tables() {
        let uri = PostgresServer::shared().database();
        for _ in 0..2 {
            assert!(matches!(open(&uri, Access::Existing), Err(StoreError::Missing)));
        }
        open(&uri, Access::Create).expect("a new database");
        open(&uri, Access::Existing).expect("it is there");
    }

    #[test]
    fn tables_of_another_program_are_left_alone() {
        let uri = PostgresServer::shared().database();
        run(&uri, "CREATE TABLE mine (x BIGINT)");
        let error = open(&uri, Access::Create).expect_err("it is not ours").to_string();
        assert!(error.contains("another program"), "{error}");
    }
}
