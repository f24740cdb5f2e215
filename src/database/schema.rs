//! The tables of a program: an open creates or upgrades them, in one transaction.

use std::time::Duration;

use super::Session;
use crate::error::{Problem, ProblemKind, Result};

/// The time for creating the tables, with everything that a move fills in.
pub const CREATE_TIMEOUT: Duration = Duration::from_secs(3600);

/// The numbers of PostgreSQL's advisory lock: any that other programs in a database do not use.
const ADVISORY_LOCK: &str = "1633970793, 1";

/// The changes that an open may make to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Create it, or upgrade it: only for a process that no other one uses the database beside.
    Serve,
    /// Create it.
    Create,
    /// Neither.
    Existing,
    /// Nothing at all: also for a file that can't be written.
    Read,
}

impl Access {
    pub fn may_create(self) -> bool {
        matches!(self, Self::Serve | Self::Create)
    }
}

pub struct Schema {
    /// The script that creates the tables and their first rows.
    pub tables: &'static str,
    pub version: i64,
    /// The versions that can be upgraded, in their order, each with the step to the one after it.
    pub steps: &'static [(i64, UpgradeStep)],
}

/// Runs in the transaction that notes the new version.
pub type UpgradeStep = fn(&Session) -> Result<()>;

impl Schema {
    /// Creates the tables or upgrades them, as far as that is needed and `access` allows it. Returns
    /// whether it created them.
    pub fn bring_up_to_date(&self, session: &Session, access: Access) -> Result<bool> {
        // Nearly always there is nothing to do, and these queries take no lock.
        match version(session)? {
            Some(found) if self.missing_steps(found, access)?.is_empty() => return Ok(false),
            None if !access.may_create() => {
                refuse_other_program(session)?;
                // A start that was interrupted has left a database without tables.
                return Err(Problem::missing());
            }
            _ => {}
        }
        begin(session)?;
        // Another process may have done it meanwhile.
        let found = version(session)?;
        match found {
            None => self.create_tables(session)?,
            Some(found) => {
                for (version, step) in self.missing_steps(found, access)? {
                    log::info!("upgrading the database from version {version}");
                    step(session)?;
                }
                self.note_version(session)?;
            }
        }
        session.commit(&[])?;
        Ok(found.is_none())
    }

    /// Creates the tables in an empty database and runs `fill`, in one transaction: if that fails,
    /// or this process ends, the database is still empty. Programs that open it meanwhile wait.
    pub fn create_with<T>(
        &self,
        session: &Session,
        fill: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        begin(session)?;
        if version(session)?.is_some() {
            return Err(Problem::other(
                "it has a ledger already. If a move was made to it before, that move is complete; else create an \
                 empty database",
            ));
        }
        self.create_tables(session)?;
        let value = fill(session)?;
        session.commit(&[])?;
        Ok(value)
    }

    fn create_tables(&self, session: &Session) -> Result<()> {
        refuse_other_program(session)?;
        if let Session::Postgres(_) = session {
            session.run_script(
                "CREATE TABLE schema_version (id BIGINT PRIMARY KEY CHECK (id = 1), version BIGINT NOT NULL);
                 INSERT INTO schema_version VALUES (1, 0)",
            )?;
        }
        session.run_script(self.tables)?;
        self.note_version(session)
    }

    fn note_version(&self, session: &Session) -> Result<()> {
        let version = self.version;
        session.run_script(&match session {
            Session::Sqlite(_) => format!("PRAGMA user_version = {version}"),
            Session::Postgres(_) => format!("UPDATE schema_version SET version = {version}"),
        })
    }

    /// Fails if another program has changed the tables to another version.
    pub fn check_version(&self, session: &Session) -> Result<()> {
        let (found, known) = (version(session)?.unwrap_or(0), self.version);
        if found == known {
            return Ok(());
        }
        Err(Problem::new(
            ProblemKind::Fenced,
            format!(
                "the database now has version {found}, because another program has changed it, and this one knows version \
                 {known}: install the version that changed it, or restore a backup"
            ),
        ))
    }

    /// The steps that a database of this version lacks; none if it has the version of this program.
    /// Fails if it can't be upgraded, or this open may not do that.
    fn missing_steps(&self, found: i64, access: Access) -> Result<&'static [(i64, UpgradeStep)]> {
        let known = self.version;
        if found == known {
            return Ok(&[]);
        }
        let first = self.steps.iter().position(|(version, _)| *version == found);
        let hint = match (first, access) {
            (Some(first), Access::Serve) => return Ok(&self.steps[first..]),
            (Some(_), _) => {
                "make a backup, then restart the service (or start adriaticum serve) of this version, which upgrades it"
            }
            (None, _) if found > known => "install the version that made it, or a later one",
            (None, _) => "no release had it, so begin with a new database",
        };
        Err(Problem::new(
            ProblemKind::Version,
            format!(
                "the database has version {found}, and this program needs version {known}: {hint}"
            ),
        ))
    }
}

/// The version of the tables; `None` if there are none yet.
pub fn version(session: &Session) -> Result<Option<i64>> {
    let query = match session {
        Session::Sqlite(_) => {
            "SELECT user_version FROM pragma_user_version WHERE user_version <> 0"
        }
        Session::Postgres(_) => {
            let exists = "SELECT count(*) FROM pg_tables
                WHERE schemaname = current_schema() AND tablename = 'schema_version'";
            if session.value::<i64>(exists, &[])? == 0 {
                return Ok(None);
            }
            "SELECT version FROM schema_version"
        }
    };
    session.first(query, &[], |mut row| row.column())
}

/// Begins a transaction in which no other program can change the schema.
fn begin(session: &Session) -> Result<()> {
    session.run_script(&match session {
        Session::Sqlite(_) => "BEGIN IMMEDIATE".into(),
        Session::Postgres(_) => format!(
            "BEGIN; SET LOCAL statement_timeout = {}; SELECT pg_advisory_xact_lock({ADVISORY_LOCK})",
            CREATE_TIMEOUT.as_millis()
        ),
    })
}

/// A database that has tables but no version belongs to another program.
pub fn refuse_other_program(session: &Session) -> Result<()> {
    let tables = match session {
        Session::Sqlite(_) => "SELECT count(*) FROM sqlite_schema",
        Session::Postgres(_) => {
            "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()"
        }
    };
    match session.value::<i64>(tables, &[])? {
        0 => Ok(()),
        _ => Err(Problem::other(
            "it has tables of another program: name or create a database for this one",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_begins_at_the_version_that_was_found() {
        fn step(_: &Session) -> Result<()> {
            Ok(())
        }
        let schema = Schema {
            tables: "",
            version: 13,
            steps: &[(11, step), (12, step)],
        };
        #[track_caller]
        fn check(schema: &Schema, found: i64, access: Access, expected: Result<&[i64], &str>) {
            let steps = schema.missing_steps(found, access);
            match (steps, expected) {
                (Ok(steps), Ok(expected)) => {
                    let versions: Vec<i64> = steps.iter().map(|(version, _)| *version).collect();
                    assert_eq!(versions, expected);
                }
                (Err(problem), Err(expected)) => {
                    assert_eq!(problem.kind, ProblemKind::Version);
                    assert!(problem.text.contains(expected), "{problem}");
                }
                (found, expected) => panic!("{expected:?}, {}", found.is_ok()),
            }
        }
        check(&schema, 13, Access::Read, Ok(&[]));
        check(&schema, 11, Access::Serve, Ok(&[11, 12]));
        check(&schema, 12, Access::Serve, Ok(&[12]));
        check(&schema, 12, Access::Create, Err("which upgrades it"));
        check(&schema, 10, Access::Serve, Err("no release had it"));
        check(&schema, 14, Access::Serve, Err("a later one"));
    }
}
