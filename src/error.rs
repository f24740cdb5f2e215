//! The errors. Of a request: [`ApiError`], the table of part 7 of the specification, closed; a
//! [`Failure`], which has its details; and a [`FailureCause`]. Of everything else: [`Problem`], a
//! sentence for people, worded where it is found.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// One row of the table: an error that a client can recognize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiError {
    InvalidRequest,
    InvalidApiKey,
    InsufficientPermission,
    NotFound,
    PayloadTooLarge,
    InferenceError,
    SearchUnavailable,
    ServiceUnavailable,
}

impl ApiError {
    /// In the order of the table, which is that of the variants.
    pub const ALL: [Self; 8] = [
        Self::InvalidRequest,
        Self::InvalidApiKey,
        Self::InsufficientPermission,
        Self::NotFound,
        Self::PayloadTooLarge,
        Self::InferenceError,
        Self::SearchUnavailable,
        Self::ServiceUnavailable,
    ];

    pub fn code(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::InvalidApiKey => "invalid_api_key",
            Self::InsufficientPermission => "insufficient_permission",
            Self::NotFound => "not_found",
            Self::PayloadTooLarge => "payload_too_large",
            Self::InferenceError => "inference_error",
            Self::SearchUnavailable => "search_unavailable",
            Self::ServiceUnavailable => "service_unavailable",
        }
    }

    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::InvalidApiKey => 401,
            Self::InsufficientPermission => 403,
            Self::NotFound => 404,
            Self::PayloadTooLarge => 413,
            Self::InferenceError => 502,
            Self::SearchUnavailable | Self::ServiceUnavailable => 503,
        }
    }
}

/// A request that got no completion: the message for the client, the word for the log and the
/// ledger, and the details for the operator.
#[derive(Debug)]
pub struct Failure {
    pub error: ApiError,
    /// For the client: what happened and what to do next. It may name a number, a length or a
    /// member.
    pub message: Cow<'static, str>,
    pub cause: FailureCause,
    /// For the operator, in a log line of its own: what happened and what to do, with nothing in it
    /// that a client wrote.
    pub details: Option<String>,
    /// For the log: the key of a 401, if it is known.
    pub key_id: Option<String>,
    /// Clients should not retry automatically: a retry would cost another inference, or query a
    /// Search that is down.
    pub no_retry: bool,
}

impl Failure {
    pub fn new(
        error: ApiError,
        cause: FailureCause,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            error,
            message: message.into(),
            cause,
            details: None,
            key_id: None,
            no_retry: false,
        }
    }

    pub fn invalid(cause: FailureCause, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ApiError::InvalidRequest, cause, message)
    }

    pub fn unavailable(
        cause: FailureCause,
        message: impl Into<Cow<'static, str>>,
        details: Option<String>,
    ) -> Self {
        Self {
            details,
            ..Self::new(ApiError::ServiceUnavailable, cause, message)
        }
    }

    /// The 503 for a request that is shed under overload, or a connection that is rejected. The
    /// body was not parsed.
    pub fn overloaded(cause: FailureCause) -> Self {
        let message = "The service has more requests than it can take. Try again shortly.";
        Self::unavailable(cause, message, None)
    }
}

/// Makes the list of causes, each in one word: the same in its log line and in its row. It is fixed,
/// so neither can contain what a client wrote.
macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident $word:literal)+) => {
        /// The cause of an error: for a refusal (4xx) the thing refused, for a failure (5xx) its
        /// class.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum FailureCause {
            $($(#[$doc])* $name,)+
            /// A member of the request that the service knows.
            Member(&'static str),
            /// The HTTP status of a runtime or of Search.
            Status(u16),
        }

        impl FailureCause {
            /// All words but the names of members and the statuses.
            pub const WORDS: &[&str] = &[$($word),+];
        }

        impl fmt::Display for FailureCause {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name => f.write_str($word),)+
                    Self::Member(name) => f.write_str(name),
                    Self::Status(status) => write!(f, "status_{status}"),
                }
            }
        }
    };
}

causes! {
    /// It can't be framed safely, or is not HTTP.
    Http "http"
    /// It was not complete in time.
    Incomplete "incomplete"
    Host "host"
    Route "route"
    TooLarge "too_large"
    /// No key, two keys, or a text that can't be one.
    NoKey "no_key"
    UnknownKey "unknown_key"
    Revoked "revoked"
    /// The secret was replaced by another one of its key.
    Replaced "replaced"
    Expired "expired"
    Permission "permission"
    Budget "budget"
    ContentType "content_type"
    ContentEncoding "content_encoding"
    /// The body is not a JSON object.
    Body "body"
    UnknownMember "unknown_member"
    /// The prompt is longer than the runtime's context.
    Context "context"
    /// A console password was wrong.
    SignIn "sign_in"

    QueueFull "queue_full"
    BuffersFull "buffers_full"
    ConnectionsFull "connections_full"

    NoRuntime "no_runtime"
    Panic "panic"

    /// A runtime or Search refused the connection.
    Refused "refused"
    /// No connection for another reason, such as a name without an address, or a certificate that
    /// is not trusted.
    Unreachable "unreachable"
    Timeout "timeout"
    /// The connection ended in the middle of a call, or the answer is not valid HTTP.
    Broken "broken"
    /// The client has gone.
    Cancelled "cancelled"
    AnswerTooLarge "answer_too_large"
    /// The answer is not JSON of the expected form.
    NotJson "not_json"
    NoText "no_text"
    /// Search found nothing because its engines did not respond.
    Engines "engines"
    /// There is no index, or it can't be read.
    Index "index"

    DiskFull "disk_full"
    /// The database is locked, or all connections to it are in use.
    DatabaseBusy "database_busy"
    /// No host of the database can be used, or it did not confirm a write.
    DatabaseLost "database_lost"
    /// Any other failure of the database.
    Database "database"
}

impl FailureCause {
    /// Returns true if there was no room for the request.
    pub fn is_shed(self) -> bool {
        matches!(
            self,
            Self::QueueFull | Self::BuffersFull | Self::ConnectionsFull
        )
    }
}

/// What went wrong, and what to do about it. The text begins with a small letter and has no full
/// stop at its end, so that it can follow the name of a file or a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub kind: ProblemKind,
    pub text: String,
}

/// As `io::Result` is for `io::Error`.
pub type Result<T, E = Problem> = std::result::Result<T, E>;

/// The kinds that code branches on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// Others have used the database for too long; a later try may succeed.
    Busy,
    /// The disk is full.
    Full,
    /// The command line is wrong.
    Usage,
    /// A setting can't be used; a supervisor need not try again.
    Setting,
    /// There is no database, and none is to be created.
    Missing,
    /// The database is damaged, or not one of ours.
    Damaged,
    /// The database has a schema that this program does not know.
    Version,
    /// Everything was moved to another database.
    Moved,
    /// What was written last may be lost, so nothing more is written until a restart.
    Unsafe,
    /// Another process serves in the place of this one, which has to stop.
    Fenced,
    /// Retention has removed rows that a report needs.
    RowsRemoved,
    /// The key was revoked before the request arrived.
    KeyRevoked,
    /// The secret was replaced before the request arrived.
    KeyReplaced,
    /// No host of the database can be used.
    Unavailable,
    /// No answer came to what was sent: it may have been done or not.
    Unknown,
    Panicked,
    Other,
}

impl Problem {
    pub fn new(kind: ProblemKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    pub fn other(text: impl Into<String>) -> Self {
        Self::new(ProblemKind::Other, text)
    }

    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(ProblemKind::Usage, text)
    }

    /// The same problem, with a text in front that says what it is about.
    pub fn of(self, part: impl fmt::Display) -> Self {
        Self {
            text: format!("{part}: {}", self.text),
            ..self
        }
    }

    /// The log line about a request that failed at a step; `None` if the log has a line about the
    /// database already.
    pub fn details(&self, step: &str) -> Option<String> {
        (self.kind != ProblemKind::Unavailable).then(|| format!("{step}: {self}"))
    }

    /// The word for a request that failed because of it.
    pub fn cause(&self) -> FailureCause {
        match self.kind {
            ProblemKind::Busy => FailureCause::DatabaseBusy,
            ProblemKind::Full => FailureCause::DiskFull,
            ProblemKind::Unavailable | ProblemKind::Unknown => FailureCause::DatabaseLost,
            ProblemKind::Panicked => FailureCause::Panic,
            _ => FailureCause::Database,
        }
    }
}

/// Problems that both engines of the database have.
impl Problem {
    pub fn damaged(cause: impl Into<String>) -> Self {
        Self::new(
            ProblemKind::Damaged,
            format!(
                "the file is damaged or not a database ({}): stop the service and restore a backup (adriaticum restore FILE), \
                 or save what can be read of it: sqlite3 DAMAGED .recover | sqlite3 NEW",
                cause.into()
            ),
        )
    }

    pub fn files_changed() -> Self {
        Self::new(
            ProblemKind::Unsafe,
            "the database's file, its -wal or its -shm was removed, replaced or changed by another program under the \
             running service, so nothing more is written: put it back or restore a backup, then restart",
        )
    }

    pub fn read_only() -> Self {
        Self::other(
            "the database can't be written: check who owns the file and its folder, and whether the file system is read-only",
        )
    }

    /// A read that was ended at its deadline.
    pub fn late() -> Self {
        Self::new(
            ProblemKind::Busy,
            "the database took too long to answer: try again, or ask for less",
        )
    }

    pub fn no_connection() -> Self {
        Self::new(
            ProblemKind::Busy,
            "all of this process's connections to the database are in use: try again when its long reads are done",
        )
    }

    pub fn missing() -> Self {
        Self::new(
            ProblemKind::Missing,
            "it does not exist: create it with adriaticum serve, keys create, console password, restore or move",
        )
    }

    pub fn unknown(cause: impl fmt::Display) -> Self {
        Self::new(
            ProblemKind::Unknown,
            format!("the database did not confirm the write: {cause}"),
        )
    }

    pub fn unavailable(cause: impl fmt::Display) -> Self {
        Self::new(
            ProblemKind::Unavailable,
            format!("the database can't be used: {cause}"),
        )
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Problem {}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::other(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_whole_and_in_the_order_of_the_variants() {
        assert!(
            ApiError::ALL
                .iter()
                .enumerate()
                .all(|(place, &error)| error as usize == place)
        );
        assert_eq!(
            ApiError::ServiceUnavailable as usize + 1,
            ApiError::ALL.len(),
            "the last variant"
        );
    }

    #[test]
    fn words_are_words() {
        let mut words = FailureCause::WORDS.to_vec();
        assert!(
            words
                .iter()
                .all(|word| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        );
        words.sort_unstable();
        assert!(
            words.windows(2).all(|pair| pair[0] != pair[1]),
            "one word, one cause"
        );
        assert_eq!(FailureCause::Status(500).to_string(), "status_500");
        assert_eq!(FailureCause::Member("max_tokens").to_string(), "max_tokens");
    }

    #[test]
    fn every_word_is_explained() {
        let page = include_str!("../docs/monitoring.md");
        for word in FailureCause::WORDS {
            assert!(
                page.contains(&format!("`{word}`")),
                "docs/monitoring.md lacks {word}"
            );
        }
    }
}
