//! The pages that say why another page can't be displayed, or what to do first.

use maud::html;

use super::assets::Assets;
use super::layout::{copy_box, operator_page, plain_page};
use super::page_request::ConsoleSession;
use super::{Console, PageError};
use crate::http::{ClientInfo, Response};
use crate::logging;

/// A page that requests an address again, now from within this site.
pub fn reload_from_here(assets: &Assets, address: &str) -> Response {
    let content = html! {
        main.narrow {
            h1 { "One moment" }
            p { "If nothing happens, " a href=(address) { "go on to the page" } "." }
        }
    };
    plain_page(assets, 200, "One moment", &content).with("refresh", format!("0; url={address}"))
}

/// The only page of a console without a password.
pub fn no_password(assets: &Assets, command: &str) -> Response {
    let content = html! {
        main.narrow {
            h1 { "Set a password first" }
            p { "The console opens once it has a password. On the machine that the service runs on, as the user that \
                 it runs as:" }
            (copy_box("Command", "command", command))
            p.muted { "At least 12 characters; takes effect immediately. Then " a href="/" { "load this page again" } "." }
        }
    };
    plain_page(assets, 200, "Set a password first", &content)
}

pub fn busy(console: &Console) -> Response {
    let text = "Try again in a moment. Completions are not affected.";
    message(console, None, 503, "The console is busy", text).with("retry-after", "1")
}

/// The page after a panic.
pub fn broken(console: &Console) -> Response {
    let text = "The service’s log has the reason. Completions are not affected.";
    message(console, None, 503, "Something went wrong", text).with("retry-after", "5")
}

pub fn error(
    console: &Console,
    session: Option<&ConsoleSession>,
    client: ClientInfo,
    error: &PageError,
) -> Response {
    let (status, title, text) = match error {
        PageError::NotFound => (404, "Page not found", "Check the address."),
        PageError::Method => (405, "Not possible here", "Nothing was changed."),
        PageError::TooLarge => (413, "The form is too large", "It has more than 16 KiB."),
        PageError::Stale => (
            403,
            "The form was too old",
            "You have signed in again since it was loaded. Nothing was changed. Go back, load the page again and \
             repeat the change.",
        ),
        PageError::Foreign => (
            403,
            "The form came from elsewhere",
            "Another site's page sent it. Nothing was changed. If you did not intend this, contact the operator of that site.",
        ),
        PageError::Wait(_) => (429, "Too many requests", "Try again in a moment."),
        PageError::Store(error) => {
            // Without the database no session can be verified, so anyone can cause this line.
            if logging::allow_stranger(error.cause(), client.peer) {
                log::error!("console: {error}");
            }
            let text = "It can’t be read or written at the moment. The service’s log has the reason.";
            (503, "The database does not answer", text)
        }
    };
    let response = message(console, session, status, title, text);
    match error {
        PageError::Method => response.with("allow", "GET, POST"),
        PageError::Wait(time) => response.with("retry-after", time.as_secs().max(1).to_string()),
        PageError::Store(_) => response.with("retry-after", "5"),
        _ => response,
    }
}

/// A page with one message. A signed-in operator keeps the navigation.
fn message(
    console: &Console,
    session: Option<&ConsoleSession>,
    status: u16,
    title: &str,
    text: &str,
) -> Response {
    let content = html! {
        main.narrow {
            h1 { (title) }
            p { (text) }
            p { a href="/" { "Back to API keys" } }
        }
    };
    let mut response = match session {
        Some(session) => operator_page(console, session, None, title, &content),
        None => plain_page(&console.assets, status, title, &content),
    };
    response.status = status;
    response
}
