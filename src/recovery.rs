//! Puts a database in the place of another: a backup of a SQLite database is restored, or everything
//! is moved from a SQLite database to an empty PostgreSQL database.

use std::cell::RefCell;
use std::mem;
use std::path::Path;
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::audit::{Actor, AuditRow, NewAuditRow, SELECT_AUDIT};
use crate::database::postgres::Postgres;
use crate::database::sqlite::FileLock;
use crate::database::sqlite::backup::{Backup, PresentDatabase, Replacement};
use crate::database::{CHANGE_TIMEOUT, Database, DatabaseUri, Row, Session, Value, values};
use crate::error::{Problem, ProblemKind, Result};
use crate::ledger::{self, SCHEMA, Verification};
use crate::progress::Progress;
use crate::text::count;
use crate::time_zone;
use crate::when::Zone;

/// A condition for the audit rows of changes that are kept.
const KEPT: &str = "(action = 'password_set' OR action IN ('key_revoked', 'key_rotated') AND key_id IN (SELECT id FROM main.keys))";

/// The result of a restore.
pub struct Restoration {
    /// What was restored and what that undoes, in lines.
    pub report: Vec<String>,
    /// Fails if a power failure may undo the restore.
    pub synced: Result<()>,
}

/// Replaces a SQLite database with a backup. If this fails, the present database is as it was, and
/// the error begins with the file that it is about.
///
/// A backup knows nothing of what came after it: a key that was revoked since would work again, and
/// so would a secret that was replaced. So revocations, secrets and the console's password are taken
/// from the present database, and what else the audit has since is listed.
pub fn restore(
    database: &Path,
    backup: Backup,
    by: &Actor,
    progress: &Progress,
) -> Result<Restoration> {
    let _lock = FileLock::take(database).map_err(|problem| problem.of(database.display()))?;
    let name = backup.name.clone();
    let replacement = Replacement::prepare(database, backup, &SCHEMA, progress)?;
    let found = ledger::verify(&replacement.session(), progress)?;
    if let Some(fault) = found.fault {
        let text = format!("{name}: its ledger does not verify: {fault}. Use another backup");
        return Err(Problem::other(text));
    }
    let zone = time_zone::read(&replacement.session())?;
    let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
    let session = replacement.session();
    let newest: Option<i64> = session.first(newest, &[], |mut row| row.column())?;
    let rows = count(found.rows as i64, "row");
    let of_newest = newest.map_or(String::new(), |_| {
        format!(", the newest of {}", zone.format_minute(newest))
    });
    let mut report = vec![format!("{name}: {rows}{of_newest}, verified.")];
    let present = replacement.attach_present(progress)?;
    let is_sound = matches!(present, PresentDatabase::Sound);
    match present {
        PresentDatabase::Missing => report.push("There was no database before.".into()),
        PresentDatabase::Unreadable(problem) => report.extend([
            format!(
                "The former database can't be read ({}), so what this undoes is unknown.",
                cause(&problem)
            ),
            KEYS_ARE_OLD.into(),
            PASSWORD_IS_OLD.into(),
        ]),
        PresentDatabase::Sound | PresentDatabase::Damaged => {
            report.extend(take_over(&replacement, &zone)?);
        }
    }
    let audit = NewAuditRow::new("database_restored", by);
    replacement.change(|session| {
        session.execute("UPDATE console_browsers SET session_ends = NULL", &[])?;
        audit.insert(session, None, &format!("a backup with {rows}{of_newest}"))
    })?;
    let (kept, unsynced) = replacement.put_in_place()?;
    let database = database.display();
    report.push("All console sessions have ended.".into());
    report.push(format!("{database} is restored. Start the service."));
    if let Some(kept) = kept {
        let kept = kept.display();
        report.push(format!("The former database is kept as {kept}"));
        report.push(match is_sound {
            true => format!("To go back: stop the service and run adriaticum restore {kept}"),
            false => format!("What can be read of it: sqlite3 {kept} .recover | sqlite3 NEW"),
        });
    }
    let synced = unsynced.map_or(Ok(()), |error| {
        Err(Problem::other(format!(
            "{database}: the backup is in place, but its folder could not be synced ({error}), so after a power failure the \
             former database may be there again. Check the disk, then run sync"
        )))
    });
    Ok(Restoration { report, synced })
}

const KEYS_ARE_OLD: &str = "So keys that were revoked, rotated or changed since the backup work as they did then: look \
    through adriaticum keys list, and revoke or rotate them again.";

const PASSWORD_IS_OLD: &str = "The console's password is that of the backup, if it has one.";

/// Gives the copy what is kept of the present database. Each part is read by itself: a damaged page
/// spoils only one of them. Returns what is kept, what is undone and what can't be read, in lines.
fn take_over(copy: &Replacement, zone: &Zone) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let mut part = |what: &str, part: Result<Vec<String>>, otherwise: &str| {
        match part {
            Ok(found) => lines.extend(found),
            Err(problem) if is_unread(&problem) => {
                let cause = cause(&problem);
                let text = format!("The {what} of the former database can't be read: {cause}.");
                lines.extend([text, otherwise.to_owned()]);
                lines.retain(|line| !line.is_empty());
            }
            Err(problem) => return Err(problem),
        }
        Ok(())
    };
    part("requests", undone_requests(&copy.session()), "")?;
    part(
        "audit",
        copy.change(|session| take_over_audit(session, zone)),
        "",
    )?;
    part("keys", copy.change(take_over_keys), KEYS_ARE_OLD)?;
    part("password", copy.change(take_over_password), PASSWORD_IS_OLD)?;
    Ok(lines)
}

/// Returns whether a problem is one of the former database, and not of the disk.
fn is_unread(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::Damaged | ProblemKind::Other)
}

/// Words a problem without its advice, which is for a database in use.
fn cause(problem: &Problem) -> &str {
    match problem.kind {
        ProblemKind::Damaged => "it is damaged",
        _ => &problem.text,
    }
}

fn undone_requests(session: &Session) -> Result<Vec<String>> {
    let lost = "SELECT count(*) FROM present.usage AS later
        WHERE NOT EXISTS (SELECT 1 FROM main.usage AS kept WHERE kept.request_id = later.request_id)";
    let lost: i64 = session.value(lost, &[])?;
    Ok(match lost {
        0 => vec!["The backup has every request of the former database.".into()],
        _ => vec![format!(
            "The former database has {} more, which the ledger and its sums lose.",
            count(lost, "request")
        )],
    })
}

fn take_over_audit(session: &Session, zone: &Zone) -> Result<Vec<String>> {
    let take = format!(
        "INSERT INTO main.audit SELECT * FROM present.audit
         WHERE id NOT IN (SELECT id FROM main.audit) AND {KEPT}"
    );
    session.execute(&take, &[])?;
    let undone = SELECT_AUDIT.replace("FROM audit", "FROM present.audit")
        + " WHERE id NOT IN (SELECT id FROM main.audit) AND action <> 'signed_in' ORDER BY id";
    let undone = session.rows(&undone, &[], |row| {
        let row = AuditRow::read(row)?;
        let key = match (&row.key_id, &row.key_name) {
            (Some(id), Some(name)) => format!(" {id} ({name})"),
            _ => String::new(),
        };
        let (time, action) = (zone.format_minute(Some(row.created)), row.description());
        let details = format!("  {time} {action}{key}: {}", row.details);
        Ok(details.trim_end_matches(": ").to_owned())
    })?;
    Ok(listed(
        "Changes since the backup, which are undone:",
        undone,
    ))
}

fn take_over_keys(session: &Session) -> Result<Vec<String>> {
    let keys = |query: &str| {
        session.rows(query, &[], |mut row| {
            let (id, name): (String, String) = (row.column()?, row.column()?);
            Ok(format!("  {id} ({name})"))
        })
    };
    let revoked = keys(
        "UPDATE main.keys SET revoked = (SELECT revoked FROM present.keys AS later WHERE later.id = keys.id)
         WHERE revoked IS NULL AND id IN (SELECT id FROM present.keys WHERE revoked IS NOT NULL) RETURNING id, name",
    )?;
    let rotated = keys(
        "SELECT id, name FROM main.keys WHERE id IN
         (SELECT key_id FROM present.key_secrets WHERE digest NOT IN (SELECT digest FROM main.key_secrets))",
    )?;
    for take in [
        "DELETE FROM main.key_secrets WHERE key_id IN (SELECT id FROM present.keys)",
        "INSERT INTO main.key_secrets (digest, key_id, hint, created, ends)
         SELECT digest, key_id, hint, created, ends FROM present.key_secrets WHERE key_id IN (SELECT id FROM main.keys)",
    ] {
        session.execute(take, &[])?;
    }
    let older = keys(
        "SELECT id, name FROM main.keys WHERE revoked IS NULL AND id NOT IN (SELECT id FROM present.keys)",
    )?;
    Ok([
        listed("Revoked since the backup, and these stay revoked:", revoked),
        listed(
            "Rotated since the backup, and these keep their present secret:",
            rotated,
        ),
        listed(
            "Only in the backup, so these work again unless they have expired:",
            older,
        ),
    ]
    .concat())
}

fn take_over_password(session: &Session) -> Result<Vec<String>> {
    let take = "INSERT OR REPLACE INTO main.console_password (id, salt, hash, memory_kib, passes)
        SELECT id, salt, hash, memory_kib, passes FROM present.console_password";
    Ok(match session.execute(take, &[])? {
        0 => vec![
            "The console had no password, so it has that of the backup, if there is one.".into(),
        ],
        _ => vec!["The console keeps its present password.".into()],
    })
}

/// A title and the lines below it; nothing if there are none.
fn listed(title: &str, lines: Vec<String>) -> Vec<String> {
    let title = Some(title.to_owned()).filter(|_| !lines.is_empty());
    title.into_iter().chain(lines).collect()
}

/// The number of values that one statement sends. PostgreSQL's limit is 65,535.
const VALUES_AT_ONCE: usize = 8_000;

/// The tables of a SQLite database: their names, their columns, and the columns of their primary
/// keys.
const TABLES: &str = "SELECT name,
    (SELECT group_concat(name, ', ' ORDER BY cid) FROM pragma_table_info(tables.name)),
    (SELECT group_concat(name, ', ' ORDER BY pk) FROM pragma_table_info(tables.name) WHERE pk > 0)
    FROM sqlite_schema AS tables WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name";

/// The result of a move that has filled and verified the target.
pub struct MoveResult {
    pub found: Verification,
    /// Whether the source is marked, or why it can still be used by mistake.
    pub marked: Result<()>,
}

/// Copies every table of a SQLite database to an empty one, verifies the copy (each value, the
/// chains and the sums), and marks this database as moved. Nothing can be written here meanwhile.
///
/// Creating the tables, filling them and verifying them is one transaction there: whatever ends it
/// early leaves an empty database, so a move is repeated from its beginning, and no program can use
/// half a copy.
///
/// The source is marked as soon as the target is committed, in the transaction that has kept others
/// from changing it. If the process ends between the two commits, both databases can be used:
/// neither can know about the other's commit.
pub fn move_to(
    database: &Database,
    target: &DatabaseUri,
    progress: &Progress,
) -> Result<MoveResult> {
    let filled = RefCell::new(None);
    let deadline = Instant::now() + CHANGE_TIMEOUT;
    let marked = database.with_writer(|connection| {
        connection.transaction(deadline, None, |source| {
            let verified = Postgres::create_with(target, &SCHEMA, |target| {
                copy_tables(source, target, progress)
            })?;
            filled.replace(Some(verified));
            let mark = "INSERT INTO moved (id, target) VALUES (1, $1)";
            source.execute(mark, &values![target.to_string()]).map(drop)
        })
    });
    match (filled.into_inner(), marked) {
        (Some(found), marked) => Ok(MoveResult { found, marked }),
        (None, Err(problem)) => Err(problem),
        (None, Ok(())) => unreachable!("it is marked after it was copied"),
    }
}

fn copy_tables(source: &Session, target: &Session, progress: &Progress) -> Result<Verification> {
    for table in source.rows(TABLES, &[], MovedTable::read)? {
        copy_table(source, target, &table, progress)?;
    }
    let [before, after] = [source, target].map(|session| ledger::verify(session, progress));
    let (before, after) = (before?, after?);
    if before != after {
        return Err(Problem::other(format!(
            "the copy does not verify as its source does: {after:?} instead of {before:?}"
        )));
    }
    // On PostgreSQL no gateway has the name of the moved chain.
    let retire = "UPDATE gateways SET epoch = 0, version = '', address = '', last_seen = NULL";
    target.execute(retire, &[])?;
    Ok(after)
}

fn copy_table(
    source: &Session,
    target: &Session,
    table: &MovedTable,
    progress: &Progress,
) -> Result<()> {
    // A new database has a row for the first chain.
    target.execute(&format!("DELETE FROM {}", table.name), &[])?;
    let (mut copied, mut compared) = (0, 0);
    let mut batch: Vec<Value> = Vec::new();
    let mut written = Sha256::new();
    let [copying, comparing] =
        ["copying", "comparing"].map(|verb| format!("{verb} the table {}", table.name));
    source.query(&table.select(), &[], &mut |row| {
        let values = row.values();
        add_to_fingerprint(&mut written, &values);
        batch.extend(values);
        copied += 1;
        progress.show(&copying, copied);
        match batch.len() >= VALUES_AT_ONCE {
            true => table.insert(target, &mem::take(&mut batch)),
            false => Ok(()),
        }
    })?;
    table.insert(target, &batch)?;
    let mut found = Sha256::new();
    let mut check = |row: Row| {
        compared += 1;
        progress.show(&comparing, compared);
        add_to_fingerprint(&mut found, &row.values());
        Ok(())
    };
    target.query(&table.select(), &[], &mut check)?;
    if written.finalize() == found.finalize() {
        Ok(())
    } else {
        Err(Problem::other(format!(
            "the copy of the table {} differs from its source",
            table.name
        )))
    }
}

/// Adds the values of a row to a fingerprint. No two rows have the same `Debug` text.
fn add_to_fingerprint(fingerprint: &mut Sha256, values: &[Value]) {
    fingerprint.update(format!("{values:?}"));
}

struct MovedTable {
    name: String,
    /// Comma separated, as the columns of the primary key are.
    columns: String,
    key: String,
}

impl MovedTable {
    /// Reads a row of [`TABLES`].
    fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            name: row.column()?,
            columns: row.column()?,
            key: row.column()?,
        })
    }

    fn width(&self) -> usize {
        self.columns.split(',').count()
    }

    /// Reads all rows in the order of their key.
    fn select(&self) -> String {
        format!(
            "SELECT {} FROM {} ORDER BY {}",
            self.columns, self.name, self.key
        )
    }

    /// Inserts the rows that have these values.
    fn insert(&self, target: &Session, values: &[Value]) -> Result<()> {
        match values.len() / self.width() {
            0 => Ok(()),
            rows => target
                .execute(&self.insert_statement(rows), values)
                .map(drop),
        }
    }

    fn insert_statement(&self, rows: usize) -> String {
        let width = self.width();
        let row = |row: usize| {
            let parameters = (1..=width).map(|column| format!("${}", row * width + column));
            format!("({})", parameters.collect::<Vec<_>>().join(", "))
        };
        let rows: Vec<String> = (0..rows).map(row).collect();
        format!(
            "INSERT INTO {} ({}) VALUES {}",
            self.name,
            self.columns,
            rows.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements() {
        let table = MovedTable {
            name: "t".into(),
            columns: "a, b".into(),
            key: "b, a".into(),
        };
        assert_eq!(table.select(), "SELECT a, b FROM t ORDER BY b, a");
        assert_eq!(
            table.insert_statement(2),
            "INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4)"
        );
    }
}
