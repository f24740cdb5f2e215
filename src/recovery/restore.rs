//! Restores a backup of a SQLite database, and says what that undoes.
//!
//! A backup knows nothing of what came after it: a key that was revoked since would work again, and
//! so would a secret that was replaced. So revocations, secrets and the console's password are taken
//! from the present database, and what else the audit has since is listed.

use std::path::Path;

use crate::audit::{Actor, AuditRow, NewAuditRow, SELECT_AUDIT};
use crate::database::sqlite::lock::FileLock;
use crate::database::sqlite::replacement::{Backup, PresentDatabase, Replacement};
use crate::database::{Problem, ProblemKind, Result, Session};
use crate::ledger::{self, SCHEMA};
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
