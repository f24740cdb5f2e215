//! The cause of a refused or failed request, in one word: the same in its log line and in its row.
//! The list is fixed, so neither can contain what a client wrote.

use std::fmt;

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

#[cfg(test)]
mod tests {
    use super::*;

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
        let page = include_str!("../../docs/monitoring.md");
        for word in FailureCause::WORDS {
            assert!(
                page.contains(&format!("`{word}`")),
                "docs/monitoring.md lacks {word}"
            );
        }
    }
}
