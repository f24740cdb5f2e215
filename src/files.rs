//! Files that the program creates, and files with certificates and secrets.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Creates a file that only the service's own user and group may read. Returns false if it exists
/// already, and an error if it exists and can't be written.
pub fn create(path: &Path) -> io::Result<bool> {
    let mut options = OpenOptions::new();
    options.append(true).mode(0o640);
    match options.clone().create_new(true).open(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.open(path).map(|_| false)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(io::Error::new(
            error.kind(),
            format!("there is no folder {}", folder(path).display()),
        )),
        Err(error) => Err(error),
    }
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
pub mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A folder that goes when it is dropped.
    pub struct Folder(pub PathBuf);

    impl Folder {
        pub fn new() -> Self {
            let path = std::env::temp_dir()
                .join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            fs::create_dir(&path).expect("the folder for temporary files should take one");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("it should go");
        }
    }

    #[test]
    fn a_new_file_is_not_for_others_and_nothing_is_created_through_a_link() {
        let folder = Folder::new();
        let [path, link, target] = ["test.db", "link.db", "target"].map(|name| folder.0.join(name));
        assert!(create(&path).expect("it should be made"));
        assert!(!create(&path).expect("it is there already"));
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o007, 0, "others may not read it");
        symlink(&target, &link).expect("a link");
        assert!(create(&link).is_err() && !target.exists());
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
}
