//! The password of the database and the key for the runtime.
//!
//! A secret is the value of a setting, or the content of a file: of the one that a setting names,
//! else of the usual one. That is in `$CREDENTIALS_DIRECTORY`, where systemd puts the secrets of the
//! unit, else beside the configuration.

use std::io;
use std::path::{Path, PathBuf};

use super::sources::{RawSetting, Settings, WrongSetting};
use super::table;
use crate::database::DatabaseLocation;
use crate::files;
use crate::secret::Secret;

/// The secrets that a command needs. Any other may be in a file that only root can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretsNeeded {
    Nothing,
    /// The password, if the database of the configuration is PostgreSQL.
    OfDatabase,
    /// The password for any database: `move` opens another one with it.
    Password,
    /// Everything that the service needs. The files that settings name have to be good, even if
    /// nothing needs them.
    All,
}

/// A file with a secret.
struct SecretFile {
    setting: &'static str,
    usual_name: &'static str,
    /// The other setting that may have the secret.
    other: &'static str,
    /// Returns the secret in the file's text: an empty one is none. `None` means that it is wrong.
    parse: fn(&str) -> Option<&str>,
}

const PASSWORD: SecretFile = SecretFile {
    setting: "database_password_file",
    usual_name: "database-password",
    other: "the URI of database",
    parse: |text| Some(text.trim_end_matches(['\r', '\n'])),
};

const RUNTIME_KEY: SecretFile = SecretFile {
    setting: "runtime.api_key_file",
    usual_name: "runtime-key",
    other: "runtime.api_key",
    parse: key,
};

/// Returns a key without the white space around it.
fn key(text: &str) -> Option<&str> {
    let text = text.trim();
    text.bytes().all(|b| b.is_ascii_graphic()).then_some(text)
}

/// Reads the secrets of a configuration.
pub struct Secrets {
    pub needed: SecretsNeeded,
    /// The folder of the usual files, if there is one.
    pub folder: Option<PathBuf>,
    /// The files with secrets: the configuration, if it has one, and those that were read.
    pub files: Vec<PathBuf>,
}

impl Secrets {
    /// Reads the database, and the password in a file.
    pub fn database(&mut self, settings: &mut Settings) -> (DatabaseLocation, Option<Secret>) {
        let mut written_in = None;
        let database = settings.read_with("database", |raw| {
            written_in = raw.file().map(PathBuf::from);
            DatabaseLocation::parse(raw.text()).map_err(|accepted| raw.refuse_for(&accepted))
        });
        let mut database = database.unwrap_or(DatabaseLocation::Sqlite(PathBuf::new()));
        let own = match &database {
            DatabaseLocation::Postgres(uri) => uri.password.clone(),
            DatabaseLocation::Sqlite(_) => None,
        };
        let is_postgres = database.file().is_none();
        let is_needed = match self.needed {
            SecretsNeeded::Nothing => false,
            SecretsNeeded::OfDatabase => is_postgres,
            SecretsNeeded::Password => true,
            SecretsNeeded::All => is_postgres || settings.is_set(PASSWORD.setting),
        };
        self.files.extend(written_in.filter(|_| own.is_some()));
        let password = self.in_file(&PASSWORD, settings, own.as_ref(), is_needed);
        if let DatabaseLocation::Postgres(uri) = &mut database {
            uri.password = password.clone().or(own);
        }
        (database, password)
    }

    pub fn runtime_key(&mut self, settings: &mut Settings) -> Option<Secret> {
        let mut written_in = None;
        let own = settings.read_with("runtime.api_key", |raw| {
            written_in = raw.file().map(PathBuf::from);
            key(raw.text()).map(not_empty).ok_or_else(|| raw.refuse())
        });
        let own = own.flatten();
        self.files.extend(written_in.filter(|_| own.is_some()));
        let is_needed = self.needed == SecretsNeeded::All;
        self.in_file(&RUNTIME_KEY, settings, own.as_ref(), is_needed)
            .or(own)
    }

    /// Reads the secret in a file. `own` is the secret that the other setting has: it overrides the
    /// usual file.
    fn in_file(
        &mut self,
        file: &SecretFile,
        settings: &mut Settings,
        own: Option<&Secret>,
        is_needed: bool,
    ) -> Option<Secret> {
        let usual = self.folder.as_ref().map(|it| it.join(file.usual_name));
        let mut read = |raw: &RawSetting, path: PathBuf| {
            let secret = file.read(raw, &path, own)?;
            self.files.extend(secret.is_some().then_some(path));
            Ok(secret)
        };
        let secret = if settings.is_set(file.setting) {
            settings.read_with(file.setting, |raw| match is_needed {
                true => read(raw, raw.text().into()),
                false => Ok(None),
            })
        } else if let Some(path) = usual.filter(|_| is_needed && own.is_none()) {
            let setting = table::known(file.setting);
            let raw = RawSetting::by_default(setting, &path.to_string_lossy());
            settings.accept(read(&raw, path))
        } else {
            None
        };
        let secret = secret.flatten();
        settings.note_content(file.setting, secret.as_ref().map(Secret::expose));
        secret
    }
}

impl SecretFile {
    fn read(
        &self,
        raw: &RawSetting,
        path: &Path,
        own: Option<&Secret>,
    ) -> Result<Option<Secret>, WrongSetting> {
        let text = match files::read_text(path) {
            Err(error) if raw.is_default() && error.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            read => read.map_err(|error| raw.refuse_because(error))?,
        };
        let secret = (self.parse)(&text).ok_or_else(|| raw.refuse())?;
        match (not_empty(secret), own) {
            (Some(secret), Some(own)) if secret != *own => {
                Err(raw.refuse_for(&format!("no file, because {} has another one", self.other)))
            }
            (secret, _) => Ok(secret),
        }
    }
}

/// The packaged service always has the files: one is empty if no secret is needed.
fn not_empty(secret: &str) -> Option<Secret> {
    (!secret.is_empty()).then(|| Secret::new(secret))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use rustix::process::{Uid, geteuid};
    use rustix::thread::set_thread_res_uid;

    use super::*;
    use crate::config::Config;
    use crate::files::tests::Folder;

    const POSTGRES: &str = "postgresql://user@db.test/";

    impl Folder {
        fn write(&self, name: &str, text: &str) -> String {
            let path = self.0.join(name);
            fs::write(&path, text).expect("a file");
            path.display().to_string()
        }

        /// Returns the database's password, the runtime's key, and the password for another database.
        fn read(&self, set: &[(&str, &str)], needed: SecretsNeeded) -> Result<[String; 3], String> {
            let set = set.iter().map(|(name, value)| (name.into(), value.into()));
            let config = Config::read(Some(&self.0.join("a.toml")), set.collect(), needed);
            let config = config.map_err(|problem| {
                problem
                    .to_string()
                    .replace(&self.0.display().to_string(), "")
            })?;
            let password = match &config.database {
                DatabaseLocation::Postgres(uri) => uri.password.clone(),
                DatabaseLocation::Sqlite(_) => None,
            };
            let secrets = [password, config.runtime.api_key, config.database_password];
            Ok(secrets.map(|it| it.map_or("none".into(), |it| it.expose().to_owned())))
        }
    }

    /// The unit's files were found only with a variable, so a command without it had neither
    /// password nor key.
    #[test]
    fn secrets_are_beside_the_configuration_or_among_the_units_credentials() {
        let (beside, unit) = (Folder::new(), Folder::new());
        for (folder, name) in [(&beside, "beside"), (&unit, "unit")] {
            folder.write("runtime-key", &format!("key-{name}\n"));
            folder.write("database-password", &format!("word-{name}\n"));
        }
        let other = unit.write("other", "other");
        let read = |text: &str, set: &[(&str, &str)]| {
            beside.write("a.toml", text);
            let read = beside.read(set, SecretsNeeded::All);
            read.map(|[password, key, _]| format!("{password} {key}"))
        };
        let credentials = unit.0.display().to_string();
        let database = format!("database = '{POSTGRES}'\n");
        let named = format!(
            "{database}database_password_file = '{other}'\nruntime.api_key_file = '{other}'"
        );
        let own = [
            ("ADRIATICUM_DATABASE", "postgresql://user:mine@db.test/"),
            ("ADRIATICUM_RUNTIME_API_KEY", "mine"),
        ];
        for (text, set, secrets) in [
            (&*database, &[][..], "word-beside key-beside"),
            (
                &database,
                &[("CREDENTIALS_DIRECTORY", &*credentials)],
                "word-unit key-unit",
            ),
            ("", &[], "none key-beside"),
            (&named, &[], "other other"),
            (
                &named,
                &[("ADRIATICUM_RUNTIME_API_KEY_FILE", "")],
                "other key-beside",
            ),
            (&database, &own, "mine mine"),
        ] {
            assert_eq!(read(text, set).as_deref(), Ok(secrets), "{text} {set:?}");
        }
        let without = Config::read(None, [].into(), SecretsNeeded::All);
        assert!(
            without.is_ok_and(|config| config.runtime.api_key.is_none()),
            "no file, no folder"
        );
    }

    /// A command without rights failed, or ran without the secret that it needed.
    #[test]
    fn only_a_command_that_needs_a_secret_fails_without_it() {
        let folder = Folder::new();
        folder.write("a.toml", "");
        for name in ["runtime-key", "database-password"] {
            let path = folder.write(name, "sesame\n");
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it is ours");
            if !geteuid().is_root() {
                let denied = fs::Permissions::from_mode(0o000);
                fs::set_permissions(folder.0.join(name), denied).expect("it is ours");
            }
        }
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).expect("it is ours");
        // Root may read every file, so another user does: this thread alone.
        let read = |database: &str, needed| {
            let read = || {
                if geteuid().is_root() {
                    let nobody = Uid::from_raw(65_534);
                    set_thread_res_uid(nobody, nobody, nobody).expect("root may");
                }
                folder.read(&[("ADRIATICUM_DATABASE", database)], needed)
            };
            thread::scope(|scope| scope.spawn(read).join()).expect("no panic")
        };
        let password = "database_password_file = \"/database-password\": expected a file that can be \
                        read (Permission denied (os error 13)).";
        let key = "runtime.api_key_file = \"/runtime-key\": expected a file with a key of printable \
                   characters without white space (Permission denied (os error 13)).";
        let both = format!("the configuration has 2 problems:\n  {password}\n  {key}");
        use SecretsNeeded::{All, Nothing, OfDatabase, Password};
        for (database, needed, problem) in [
            ("a.db", Nothing, ""),
            (POSTGRES, Nothing, ""),
            ("a.db", OfDatabase, ""),
            (POSTGRES, OfDatabase, password),
            ("a.db", Password, password),
            ("a.db", All, key),
            (POSTGRES, All, &both),
            ("postgresql://user:own@db.test/", All, key),
        ] {
            let problems = read(database, needed).err().unwrap_or_default();
            assert_eq!(problems, problem, "{database} {needed:?}");
        }
    }

    #[test]
    fn a_command_gets_the_secrets_that_it_needs() {
        let folder = Folder::new();
        folder.write("a.toml", "");
        folder.write("runtime-key", " key\n");
        folder.write("database-password", " word \n");
        use SecretsNeeded::{All, Nothing, OfDatabase, Password};
        for (database, needed, secrets) in [
            (POSTGRES, Nothing, ["none", "none", "none"]),
            (POSTGRES, OfDatabase, [" word ", "none", " word "]),
            (POSTGRES, All, [" word ", "key", " word "]),
            ("a.db", OfDatabase, ["none", "none", "none"]),
            ("a.db", Password, ["none", "none", " word "]),
            ("a.db", All, ["none", "key", "none"]),
        ] {
            let read = folder.read(&[("ADRIATICUM_DATABASE", database)], needed);
            assert_eq!(read, Ok(secrets.map(String::from)), "{database} {needed:?}");
        }
    }

    #[test]
    fn two_places_have_to_have_the_same_secret() {
        let folder = Folder::new();
        folder.write("a.toml", "");
        folder.write("runtime-key", "usual");
        let file = folder.write("named", "sesame\n");
        let empty = folder.write("empty", "\n");
        let read = |database: &str, key: &str, file: &str| {
            let set = [
                ("ADRIATICUM_DATABASE", database),
                ("ADRIATICUM_DATABASE_PASSWORD_FILE", file),
                ("ADRIATICUM_RUNTIME_API_KEY", key),
                ("ADRIATICUM_RUNTIME_API_KEY_FILE", file),
            ];
            folder
                .read(&set, SecretsNeeded::All)
                .map(|[word, key, _]| format!("{word} {key}"))
        };
        let same = read("postgresql://user:sesame@db.test/", "sesame", &file);
        assert_eq!(same.as_deref(), Ok("sesame sesame"));
        assert_eq!(read(POSTGRES, "", &file).as_deref(), Ok("sesame sesame"));
        assert_eq!(read(POSTGRES, "", &empty).as_deref(), Ok("none none"));
        let own = read("postgresql://user:own@db.test/", "own", &empty);
        assert_eq!(own.as_deref(), Ok("own own"));
        let own = read("postgresql://user:own@db.test/", "own", "");
        assert_eq!(own.as_deref(), Ok("own own"), "the usual file comes last");
        let differ = read("postgresql://user:own@db.test/", "own", &file);
        assert_eq!(
            differ,
            Err("the configuration has 2 problems:\n  \
                 ADRIATICUM_DATABASE_PASSWORD_FILE=\"/named\": expected no file, because the URI of \
                 database has another one.\n  \
                 ADRIATICUM_RUNTIME_API_KEY_FILE=\"/named\": expected no file, because \
                 runtime.api_key has another one."
                .into())
        );
    }
}
