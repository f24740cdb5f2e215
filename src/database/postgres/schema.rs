//! Creates the tables, or brings them to the present version, in one transaction. An advisory lock
//! serializes the programs that start at the same time.
//!
//! A program that is older than the database may use it, as long as it knows the version that the
//! database names as the oldest. If a version only adds, gateways are upgraded one after the other
//! while the rest serves. Version 10 does more.

use std::time::{Duration, Instant};

use super::pool::Pooled;
use super::protocol::PgConnection;
use super::session::PgSession;
use crate::database::access::Access;
use crate::database::error::{DatabaseError, Result};
use crate::database::schema::Schema;
use crate::database::session::Session;

/// The timeout for reading every row of a large table.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The first of the two numbers of every advisory lock; any that other programs in the same
/// database do not use.
pub(super) const LOCK: i32 = 0x6164_7269;

const VERSION_TABLE: &str = "CREATE TABLE schema_version (
    id           BIGINT PRIMARY KEY CHECK (id = 1),
    version      BIGINT NOT NULL,
    oldest_known BIGINT NOT NULL
)";

/// The state of the tables when the database was opened.
#[derive(PartialEq)]
pub(super) enum Tables {
    Created,
    Current,
    Old,
}

/// Creates the tables if there are none and `access` allows it; if they are older and may not be
/// upgraded, that is an error.
pub(super) fn prepare(
    connection: &mut PgConnection,
    schema: &Schema,
    access: Access,
) -> Result<Tables> {
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    // Nearly always there is nothing to do, and this query takes no lock.
    if let Some((found, oldest_known)) = version(connection, deadline)? {
        return schema
            .is_current(access, found, oldest_known)
            .map(Tables::found);
    }
    if !access.may_create() {
        return Err(DatabaseError::Missing);
    }
    begin(connection, deadline)?;
    if let Some((found, oldest_known)) = version(connection, deadline)? {
        connection.run_text("ROLLBACK", deadline)?;
        return schema
            .is_current(access, found, oldest_known)
            .map(Tables::found);
    }
    create(connection, schema, deadline)?;
    connection.run_text("COMMIT", deadline)?;
    Ok(Tables::Created)
}

impl Tables {
    fn found(is_current: bool) -> Self {
        if is_current { Self::Current } else { Self::Old }
    }
}

pub(super) fn upgrade(mut pooled: Pooled, schema: &Schema) -> Result<()> {
    let (connection, deadline) = (pooled.connection(), Instant::now() + UPGRADE_TIMEOUT);
    begin(connection, deadline)?;
    // Another gateway may have done it meanwhile.
    let (found, oldest_known) = version(connection, deadline)?.ok_or(DatabaseError::Missing)?;
    if schema.is_current(Access::Serve, found, oldest_known)? {
        return Ok(connection.run_text("ROLLBACK", deadline)?);
    }
    let statements = PgSession::begun(pooled);
    let session = Session::Postgres(&statements);
    let lock = format!("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", schema.lock_order);
    session.execute(&lock, &[])?;
    schema.upgrade(&session, found, &dialect)?;
    let note = format!(
        "UPDATE schema_version SET version = {}, oldest_known = {}",
        schema.version, schema.oldest_known
    );
    session.execute(&note, &[])?;
    statements.commit(&[]).map(drop)
}

/// Statements in PostgreSQL's terms. Text is ordered by its bytes, as in SQLite.
fn dialect(statements: &str) -> String {
    [
        ("{INT}", "BIGINT"),
        ("{REAL}", "DOUBLE PRECISION"),
        ("{BLOB}", "BYTEA"),
        ("{STRICT}", ""),
        ("{CLUSTERED}", ""),
        ("{ZERO_HASH}", "decode(repeat('00', 32), 'hex')"),
        ("{TEXT}", "TEXT COLLATE \"C\""),
    ]
    .iter()
    .fold(statements.to_owned(), |statements, (name, meaning)| {
        statements.replace(name, meaning)
    })
}

pub(super) fn begin_and_create(connection: &mut PgConnection, schema: &Schema) -> Result<()> {
    let deadline = Instant::now() + UPGRADE_TIMEOUT;
    begin(connection, deadline)?;
    if version(connection, deadline)?.is_some() {
        return Err(DatabaseError::Other(
            "it has a ledger already. If a move was made to it before, that move is complete; else create an \
             empty database"
                .into(),
        ));
    }
    create(connection, schema, deadline)
}

/// Begins a transaction in which no other program can change the schema.
fn begin(connection: &mut PgConnection, deadline: Instant) -> Result<()> {
    Ok(connection.run_text(
        &format!("BEGIN; SELECT pg_advisory_xact_lock({LOCK}, 1)"),
        deadline,
    )?)
}

/// Creates the tables, if there are none of another program.
fn create(connection: &mut PgConnection, schema: &Schema, deadline: Instant) -> Result<()> {
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()";
    if number(connection, tables, deadline)? > 0 {
        return Err(DatabaseError::Other(
            "it has tables of another program: create a database for this one".into(),
        ));
    }
    let changes = format!(
        "{VERSION_TABLE}; INSERT INTO schema_version VALUES (1, {}, {}); {}",
        schema.version,
        schema.oldest_known,
        dialect(schema.tables)
    );
    Ok(connection.run_text(&changes, deadline)?)
}

/// The version and the oldest that a program has to know; `None` if there are no tables yet.
pub(super) fn version(
    connection: &mut PgConnection,
    deadline: Instant,
) -> Result<Option<(i64, i64)>> {
    let exists = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema() AND tablename = 'schema_version'";
    if number(connection, exists, deadline)? == 0 {
        return Ok(None);
    }
    let found = number(connection, "SELECT version FROM schema_version", deadline)?;
    Ok(Some((
        found,
        number(
            connection,
            "SELECT oldest_known FROM schema_version",
            deadline,
        )?,
    )))
}

pub(super) fn number(
    connection: &mut PgConnection,
    statement: &str,
    deadline: Instant,
) -> Result<i64> {
    let mut found = Err(DatabaseError::NoRow);
    connection.run(None, &[(statement, &[])], deadline, &mut |mut row| {
        found = row.column()
    })?;
    found
}
