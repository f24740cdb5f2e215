//! Creating and upgrading the tables of a real server.

use std::thread;
use std::time::Duration;

use crate::database::postgres::pool::PgPool;
use crate::database::postgres::schema::version;
use crate::database::postgres::session::PgSession;
use crate::database::postgres::{DatabaseUri, Postgres};
use crate::database::{Access, DatabaseError, Result, Session};
use crate::ledger::SCHEMA;
use crate::store::test_server::PostgresServer;

const BACK_TO_9: &str = include_str!("../../../../tests/back_to_9.sql");

fn connect(uri: &str) -> PgSession {
    let uri = DatabaseUri::parse(uri).expect("a good URI");
    let pool = PgPool::new(&uri, 1).expect("a pool");
    PgSession::new(
        pool.start().expect("a connection"),
        None,
        Duration::from_secs(30),
    )
}

fn open(uri: &str, access: Access) -> Result<()> {
    Postgres::open(
        &DatabaseUri::parse(uri).expect("a good URI"),
        &SCHEMA,
        1,
        access,
    )
    .map(drop)
}

fn run(uri: &str, statements: &str) {
    connect(uri)
        .run_script(statements)
        .expect("good statements");
}

fn versions(uri: &str) -> Option<(i64, i64)> {
    version(&Session::Postgres(&connect(uri))).expect("a look")
}

/// A database of version 9 with a gateway that has served.
fn version_9() -> String {
    let uri = PostgresServer::shared().database();
    open(&uri, Access::Create).expect("a new database");
    run(
        &uri,
        &format!(
            "{BACK_TO_9}; UPDATE schema_version SET version = 9, oldest_known = 9; UPDATE gateways SET epoch = 5"
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
    Session::Postgres(&connect(uri))
        .rows(statement, &[], |mut row| row.column())
        .expect("a good statement")
}

#[test]
fn an_upgrade_runs_once_however_many_start_at_the_same_time() {
    let uri = version_9();
    let start = || {
        thread::scope(|scope| {
            let all: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| open(&uri, Access::Serve)))
                .collect();
            all.into_iter()
                .for_each(|one| one.join().expect("no panic").expect("an upgrade"));
        });
    };
    start();
    start();
    assert_eq!(versions(&uri), Some((SCHEMA.version, SCHEMA.oldest_known)));
    let epoch: Result<i64> =
        Session::Postgres(&connect(&uri)).value("SELECT epoch FROM gateways", &[]);
    assert_eq!(epoch.expect("a row"), 6);
    let new = PostgresServer::shared().database();
    open(&new, Access::Create).expect("a new database");
    assert_eq!(shape(&uri), shape(&new));
}

#[test]
fn a_failing_upgrade_changes_nothing() {
    let uri = version_9();
    run(&uri, "CREATE TABLE moved (id BIGINT)");
    let before = shape(&uri);
    assert!(open(&uri, Access::Serve).is_err());
    assert_eq!((versions(&uri), shape(&uri)), (Some((9, 9)), before));
}

#[test]
fn only_serve_upgrades_and_a_program_that_is_too_old_is_refused() {
    let uri = version_9();
    for access in [Access::Create, Access::Existing] {
        assert!(matches!(
            open(&uri, access),
            Err(DatabaseError::Older { found: 9, .. })
        ));
    }
    assert_eq!(versions(&uri), Some((9, 9)));
    open(&uri, Access::Serve).expect("an upgrade");
    run(&uri, "UPDATE schema_version SET version = version + 1");
    open(&uri, Access::Existing).expect("it knows enough");
    run(&uri, "UPDATE schema_version SET oldest_known = version");
    assert!(matches!(
        open(&uri, Access::Serve),
        Err(DatabaseError::Newer { found: 11, .. })
    ));
    run(
        &uri,
        "UPDATE schema_version SET version = 8, oldest_known = 8",
    );
    assert!(matches!(
        open(&uri, Access::Serve),
        Err(DatabaseError::Unreleased(8))
    ));
}

#[test]
fn only_a_command_that_may_creates_the_tables() {
    let uri = PostgresServer::shared().database();
    for _ in 0..2 {
        assert!(matches!(
            open(&uri, Access::Existing),
            Err(DatabaseError::Missing)
        ));
    }
    open(&uri, Access::Create).expect("a new database");
    open(&uri, Access::Existing).expect("it is there");
}

#[test]
fn tables_of_another_program_are_left_alone() {
    let uri = PostgresServer::shared().database();
    run(&uri, "CREATE TABLE mine (x BIGINT)");
    let error = open(&uri, Access::Create)
        .expect_err("it is not ours")
        .to_string();
    assert!(error.contains("another program"), "{error}");
}
