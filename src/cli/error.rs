//! The error of a command.

use std::fmt::{self, Display};
use std::io;

use crate::config::ConfigError;
use crate::database::{Problem, ProblemKind};
use crate::search::SearchError;

/// The message of a failed command, and its exit code.
pub struct CliError {
    pub code: u8,
    pub message: String,
    /// The system denies this user a file that root may open.
    pub is_denied: bool,
}

impl CliError {
    pub fn failed(message: impl Into<String>) -> Self {
        Self {
            code: 1,
            message: message.into(),
            is_denied: false,
        }
    }

    /// A setting is wrong. With this exit code, a supervisor does not try again.
    pub fn config(message: impl Into<String>) -> Self {
        Self {
            code: 2,
            ..Self::failed(message)
        }
    }

    /// The command line is wrong. The message ends as those of `clap` do.
    pub fn usage(message: &str) -> Self {
        Self::config(format!("{message}\n\nFor more information, try '--help'."))
    }

    /// An error of a file, with a message about it.
    pub fn from_access(error: &impl AccessError, message: String) -> Self {
        Self {
            is_denied: error.is_denied(),
            ..Self::failed(message)
        }
    }
}

pub fn failed<E: Display + AccessError>(part: impl Display) -> impl Fn(E) -> CliError {
    move |error| CliError::from_access(&error, format!("{part}: {error}."))
}

/// An error that may come from a file.
pub trait AccessError {
    /// Returns true if the system denies this user the file.
    fn is_denied(&self) -> bool;
}

impl AccessError for io::Error {
    fn is_denied(&self) -> bool {
        self.kind() == io::ErrorKind::PermissionDenied
    }
}

impl AccessError for Problem {
    fn is_denied(&self) -> bool {
        Problem::is_denied(self)
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self {
            is_denied: error.is_denied(),
            ..Self::config(error.to_string())
        }
    }
}

impl From<Problem> for CliError {
    fn from(error: Problem) -> Self {
        match error.kind {
            ProblemKind::RowsRemoved => Self::failed(format!("{error}.")),
            _ => failed("the database")(error),
        }
    }
}

impl From<SearchError> for CliError {
    fn from(error: SearchError) -> Self {
        Self {
            is_denied: error.is_denied,
            ..Self::failed(format!("{error}."))
        }
    }
}

impl Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
