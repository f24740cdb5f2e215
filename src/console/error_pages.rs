//! The pages that say why another page can't be displayed, or what to do first.

use std::net::IpAddr;

use maud::html;

use super::layout::{copy_box, operator_page, plain_page};
use super::page::{Operator, PageError};
use crate::database::ProblemKind;
use crate::http::Response;
use crate::logging;

/// The only page of a console without a password.
pub fn no_password(command: &str) -> Response {
    let content = html! {
        main.narrow {
            h1 { "Set a password first" }
            p { "The console opens once it has a password. On the machine that the service runs on, as the user that \
                 it runs as:" }
            (copy_box("Command", "command", command))
            p.muted { "At least 12 characters; takes effect immediately. Then " a href="/" { "load this page again" } "." }
        }
    };
    plain_page(200, "Set a password first", &content)
}

/// The page of an error. A signed-in operator keeps the navigation.
pub fn error(operator: Option<&Operator>, peer: Option<IpAddr>, error: &PageError) -> Response {
    let reason;
    let (status, title, text) = match error {
        PageError::NotFound => (404, "Page not found", "Check the address."),
        PageError::AmbiguousKey => (
            404,
            "Which key?",
            "None, or more than one, matches the filter. Give the key’s id.",
        ),
        PageError::Method => (405, "Not possible here", "Nothing was changed."),
        PageError::TooLarge => (413, "The form is too large", "It has more than 16 KiB."),
        PageError::IncompleteForm => (
            400,
            "The form is incomplete",
            "Nothing was changed. Load its page again.",
        ),
        PageError::Foreign => (
            403,
            "The form came from elsewhere",
            "Another site's page sent it. Nothing was changed. If you did not intend this, contact the \
             operator of that site.",
        ),
        PageError::TooManyExports => (
            429,
            "Too many requests",
            "One export at a time. Try again in a moment.",
        ),
        PageError::LargeExport(_) => (
            400,
            "The export is too long",
            "The console exports at most 10,000 lines, and searches for them for 5 seconds at most. Choose a shorter \
             range, or run this command on the machine that the service runs on, as the user that it runs as.",
        ),
        PageError::Busy => (
            503,
            "The console is busy",
            "Try again in a moment. Completions are not affected.",
        ),
        PageError::Panic => (
            503,
            "Something went wrong",
            "The service’s log has the reason. Completions are not affected.",
        ),
        PageError::Store(error) if error.kind == ProblemKind::RowsRemoved => {
            reason = format!("{error}.");
            (400, "These figures are not kept", reason.as_str())
        }
        PageError::Range(message) => (400, "No such range", message.as_str()),
        PageError::Store(error) => {
            // Without the database no session can be verified, so anyone can cause this line.
            if logging::allow_refusal_line(error.cause(), peer) {
                log::error!("console: {error}");
            }
            (
                503,
                "The database does not answer",
                "It can’t be read or written at the moment. The service’s log has the reason.",
            )
        }
    };
    let content = html! {
        main.narrow {
            h1 { (title) }
            p { (text) }
            @if let PageError::LargeExport(command) = error {
                (copy_box("Command", "command", command))
            }
            p { a href="/" { "Back to API keys" } }
        }
    };
    let response = match operator {
        Some(operator) => operator_page(operator, status, "", title, &content),
        None => plain_page(status, title, &content),
    };
    match (error, status) {
        (PageError::Method, _) => response.with("allow", "GET, POST"),
        (PageError::TooManyExports, _) => response.with("retry-after", "10"),
        (PageError::Busy, _) => response.with("retry-after", "1"),
        (_, 503) => response.with("retry-after", "5"),
        _ => response,
    }
}
