//! Files in the service's folder, which commands that root runs open too, and files with
//! certificates and secrets.
//!
//! The folder belongs to the service's user, who could put a link there that leads root to any
//! file, at any time. So root follows no link in a folder that another user may write to.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// The flag for a path that `resolve` returned: another user could put a link there meanwhile.
pub const NO_FOLLOW: i32 = OFlags::NOFOLLOW.bits() as i32;

/// Creates a file that only the service's own user and group may read. Returns false if it exists
/// already, and an error if it exists and can't be written.
pub fn create(path: &Path) -> io::Result<bool> {
    let mut options = OpenOptions::new();
    options.append(true).mode(0o640).custom_flags(NO_FOLLOW);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.open(resolve(path)?).map(|_| false)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(io::Error::new(
            error.kind(),
            format!("there is no folder {}", folder(path).display()),
        )),
        Err(error) => Err(error),
        Ok(file) => give_to_folder_owner(&file, path).map(|()| true),
    }
}

/// Gives a file that root has created to the service's user. Root may create the first key before
/// the service was ever started, and the service could not open a file of root.
fn give_to_folder_owner(file: &File, path: &Path) -> io::Result<()> {
    let folder = fs::metadata(folder(path))?;
    if file.metadata()?.uid() == 0 && folder.uid() != 0 {
        fchown(file, Some(folder.uid()), Some(folder.gid()))?;
    }
    Ok(())
}

/// Returns the path of an existing file without links. Fails if root would follow one in a folder
/// that another user may write to. Every writer opens the result with `NO_FOLLOW` or SQLite's
/// counterpart.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    let owner = fs::metadata(folder(path))?;
    let is_foreign = owner.uid() != 0 || owner.mode() & 0o022 != 0;
    if !rustix::process::geteuid().is_root() || !is_foreign {
        return fs::canonicalize(path);
    }
    // Only the folder is resolved: the last part could become a link after any check.
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::other("it is not the path of a file"))?;
    let real = fs::canonicalize(folder(path))?.join(name);
    if fs::symlink_metadata(&real)?.is_symlink() {
        return Err(io::Error::other(format!(
            "{} is a symbolic link in a folder that another user may write to, which root does not follow. Name the file \
             itself, or run the command as that user",
            path.display()
        )));
    }
    Ok(real)
}

/// Opens a file for reading. Refuses a pipe or a device: reading it could take forever.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}

/// Reads a certificate, a key or a password.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.read_to_end(&mut content)?;
    Ok(content)
}

pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// Reads the certificates of a PEM file: at least one.
pub fn read_certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let text = read(path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => {
            Err(io::Error::other("there is no certificate in it"))
        }
        result => result.map_err(|_| io::Error::other("it is not valid PEM")),
    }
}

pub fn folder(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// The path of a file beside another one, such as a database's WAL.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(suffix);
    path.into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A folder that belongs to another user, if the tests run as root; else one of this user.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let path = std::env::temp_dir()
                .join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            fs::create_dir(&path).expect("the folder for temporary files should take one");
            if rustix::process::geteuid().is_root() {
                chown(&path, Some(12_345), Some(54_321)).expect("root may");
            }
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("it should go");
        }
    }

    /// Only root can give files away, so as another user this shows that nothing is tried.
    #[test]
    fn what_root_makes_belongs_to_the_folder_s_owner() {
        let folder = Folder::new();
        let path = folder.0.join("test.db");
        assert!(create(&path).expect("it should be made"));
        assert!(!create(&path).expect("it is there already"));
        let (made, of) = (
            fs::metadata(&path).expect("a file"),
            fs::metadata(&folder.0).expect("a folder"),
        );
        assert_eq!((made.uid(), made.gid()), (of.uid(), of.gid()));
        assert_eq!(made.mode() & 0o007, 0, "others may not read it");
    }

    /// The folder's owner swaps the file for a link while root's command runs: see
    /// `tests/integration/search.rs` too.
    #[test]
    fn a_link_that_is_put_there_meanwhile_is_not_followed() {
        let (folder, outside) = (Folder::new(), Folder::new());
        let (path, link) = (folder.0.join("test.db"), folder.0.join("link"));
        fs::write(outside.0.join("target"), "").expect("a file");
        fs::write(&path, "").expect("a file");
        let is_over = AtomicBool::new(false);
        let found = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    fs::write(&link, "")
                        .and_then(|()| fs::rename(&link, &path))
                        .expect("a file");
                    symlink(outside.0.join("target"), &link)
                        .and_then(|()| fs::rename(&link, &path))
                        .expect("a link");
                }
            });
            let found: BTreeSet<PathBuf> = (0..2_000).filter_map(|_| resolve(&path).ok()).collect();
            is_over.store(true, Ordering::Relaxed);
            found
        });
        if rustix::process::geteuid().is_root() {
            let real = fs::canonicalize(&folder.0)
                .expect("a folder")
                .join("test.db");
            assert_eq!(found, BTreeSet::from([real]));
        }
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let folder = Folder::new();
        let (file, pipe) = (folder.0.join("file"), folder.0.join("pipe"));
        fs::write(&file, "sesame").expect("a file");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
        assert_eq!(read(&file).expect("a file"), b"sesame");
        for path in [&pipe, &folder.0, Path::new("/dev/zero")] {
            let error = read(path).expect_err("it has no end").to_string();
            assert_eq!(error, "it is not a regular file");
        }
    }

    #[test]
    fn root_follows_no_link_of_another_user() {
        let (folder, outside) = (Folder::new(), Folder::new());
        let (link, target) = (folder.0.join("link.db"), outside.0.join("target"));
        symlink(&target, &link).expect("a link");
        assert!(
            create(&link).is_err(),
            "nothing is created at the end of a link"
        );
        assert!(!target.exists());
        fs::write(&target, "").expect("a file");
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(create(&link).is_err(), is_root);
        assert_eq!(resolve(&link).is_err(), is_root);
        if is_root {
            chown(&folder.0, Some(0), Some(0)).expect("root may");
            let real = fs::canonicalize(&target).expect("it is there");
            assert_eq!(resolve(&link).expect("root's own link"), real);
            fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o1777))
                .expect("a folder for all");
            assert!(resolve(&link).is_err(), "anybody's link");
        }
    }
}
