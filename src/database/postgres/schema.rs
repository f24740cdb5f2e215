//! Creates the tables, or brings them to the present version, in one transaction. An advisory lock
//! serializes the programs that start at the same time.
//!
//! A program that is older than the database may use it, as long as it knows the version that the
//! database names as the oldest. If a version only adds, gateways are upgraded one after the other
//! while the rest serves. Version 10 does more.

use std::time::Duration;

use super::session::PgSession;
use crate::database::access::Access;
use crate::database::error::{DatabaseError, Result};
use crate::database::schema::Schema;
use crate::database::session::Session;
use crate::database::values;

/// The timeout for reading every row of a large table.
pub const UPGRADE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The first of the two numbers of every advisory lock; any that other programs in the same
/// database do not use.
pub const LOCK: i32 = 0x6164_7269;

const VERSION_TABLE: &str = "CREATE TABLE schema_version (
    id           BIGINT PRIMARY KEY CHECK (id = 1),
    version      BIGINT NOT NULL,
    oldest_known BIGINT NOT NULL
)";

/// Returns whether it created the tables.
pub fn bring_up_to_date(session: &PgSession, schema: &Schema, access: Access) -> Result<bool> {
    let statements = Session::Postgres(session);
    // Nearly always there is nothing to do, and this query takes no lock.
    if is_current(&statements, schema, access)? {
        return Ok(false);
    }
    begin(&statements)?;
    // Another gateway may have done it meanwhile.
    if is_current(&statements, schema, access)? {
        return Ok(false);
    }
    let found = version(&statements)?;
    match found {
        None => create(&statements, schema)?,
        Some((found, _)) => {
            let lock = format!("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", schema.lock_order);
            statements.execute(&lock, &[])?;
            schema.upgrade(&statements, found)?;
            let note = "UPDATE schema_version SET version = $1, oldest_known = $2";
            statements.execute(note, &values![schema.version, schema.oldest_known])?;
        }
    }
    session.run_and_commit(&[])?;
    Ok(found.is_none())
}

/// Returns whether the tables have the present version. If not, and they may not be created or
/// upgraded, that is an error.
fn is_current(session: &Session, schema: &Schema, access: Access) -> Result<bool> {
    match version(session)? {
        Some((found, oldest_known)) => schema.is_current(access, found, oldest_known),
        None if access.may_create() => Ok(false),
        None => Err(DatabaseError::Missing),
    }
}

/// Begins a transaction and creates the tables in an empty database.
pub fn begin_and_create(session: &Session, schema: &Schema) -> Result<()> {
    begin(session)?;
    if version(session)?.is_some() {
        return Err(DatabaseError::Other(
            "it has a ledger already. If a move was made to it before, that move is complete; else create an \
             empty database"
                .into(),
        ));
    }
    create(session, schema)
}

/// Begins a transaction in which no other program can change the schema.
fn begin(session: &Session) -> Result<()> {
    session.run_script(&format!("BEGIN; SELECT pg_advisory_xact_lock({LOCK}, 1)"))
}

/// Creates the tables, if there are none of another program.
fn create(session: &Session, schema: &Schema) -> Result<()> {
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()";
    if session.value::<i64>(tables, &[])? > 0 {
        return Err(DatabaseError::Other(
            "it has tables of another program: create a database for this one".into(),
        ));
    }
    session.run_script(&format!(
        "{VERSION_TABLE}; INSERT INTO schema_version VALUES (1, {}, {}); {}",
        schema.version, schema.oldest_known, schema.tables
    ))
}

/// The version and the oldest that a program has to know; `None` if there are no tables yet.
pub fn version(session: &Session) -> Result<Option<(i64, i64)>> {
    let exists = "SELECT count(*) FROM pg_tables
        WHERE schemaname = current_schema() AND tablename = 'schema_version'";
    if session.value::<i64>(exists, &[])? == 0 {
        return Ok(None);
    }
    let versions = "SELECT version, oldest_known FROM schema_version";
    session.first(versions, &[], |mut row| Ok((row.column()?, row.column()?)))
}
