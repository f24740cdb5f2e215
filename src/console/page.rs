//! What all pages share: their frame, their headers, and the pages that say why there is no other.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::assets::Assets;
use super::visit::ConsoleSession;
use super::{Console, PageError};
use crate::http::{ClientInfo, Response};
use crate::logging;
pub use crate::text::count;
use crate::text::grouped;
use crate::when;

/// Nothing but what this host serves, no script or style within a page, and no frame around it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; \
    form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The parts of the console, as the line at the top names them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Keys,
    Usage,
    Requests,
    Status,
    Audit,
}

const PARTS: [(Part, &str, &str); 5] = [
    (Part::Keys, "/keys", "API Keys"),
    (Part::Usage, "/usage", "Usage"),
    (Part::Requests, "/requests", "Requests"),
    (Part::Status, "/status", "Status"),
    (Part::Audit, "/audit", "Audit"),
];

/// A page for a signed-in operator.
pub fn inside(
    console: &Console,
    session: &ConsoleSession,
    part: Part,
    title: &str,
    content: &Markup,
) -> Response {
    signed_in(console, session, Some(part), 200, title, content)
}

fn signed_in(
    console: &Console,
    session: &ConsoleSession,
    part: Option<Part>,
    status: u16,
    title: &str,
    content: &Markup,
) -> Response {
    let has_trouble = console.monitoring.has_trouble(when::now());
    let gateway = console.config.gateway_name();
    let dot = if has_trouble { "● " } else { "" };
    let top = html! {
        span.gateway.text { (gateway) }
        nav aria-label="Console" {
            ul {
                @for (known, address, name) in PARTS {
                    li { a href=(address) aria-current=[(Some(known) == part).then_some("page")] {
                        (name)
                        @if known == Part::Status && has_trouble { " " span.dot { span.unseen { "(something is wrong)" } } }
                    } }
                }
            }
        }
        form.out method="post" action="/sign-out" {
            (form_token(session))
            button.quiet type="submit" { "Sign out" }
        }
    };
    frame(&console.assets, status, &format!("{dot}{title} · {gateway}"), &top, content)
}

/// A page for anybody.
pub fn outside(assets: &Assets, status: u16, title: &str, content: &Markup) -> Response {
    frame(assets, status, title, &html! {}, content)
}

fn frame(assets: &Assets, status: u16, title: &str, top: &Markup, content: &Markup) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Adriaticum" }
                link rel="icon" href=(assets.icon.path) type="image/svg+xml";
                link rel="stylesheet" href=(assets.style.path);
                script src=(assets.script.path) defer {}
            }
            body {
                a.skip href="#content" { "Skip to the content" }
                header {
                    a.brand href="/" { (MARK) "Adriaticum" }
                    (top)
                }
                div #content { (content) }
                footer { p { "Adriaticum " (env!("ADRIATICUM_VERSION")) " · All times are UTC" } }
            }
        }
    };
    headers(Response::new(status, "text/html; charset=utf-8", page.into_string().into_bytes()))
}

/// The waves of the icon, in the text's own colours.
const MARK: PreEscaped<&str> = PreEscaped(
    "<svg class=\"mark\" viewBox=\"0 0 24 24\" width=\"22\" height=\"22\" aria-hidden=\"true\"><path d=\"M2 9c3.3 0 \
     3.3-3 6.7-3s3.3 3 6.6 3 3.4-3 6.7-3M2 14c3.3 0 3.3-3 6.7-3s3.3 3 6.6 3 3.4-3 6.7-3M2 19c3.3 0 3.3-3 \
     6.7-3s3.3 3 6.6 3 3.4-3 6.7-3\" fill=\"none\" stroke=\"currentColor\" stroke-width=\"2\" \
     stroke-linecap=\"round\"/></svg>",
);

pub fn headers(response: Response) -> Response {
    response
        .with("content-security-policy", CONTENT_SECURITY_POLICY)
        .with("x-content-type-options", "nosniff")
        .with("x-frame-options", "DENY")
        .with("cache-control", "no-store")
        .with("referrer-policy", "no-referrer")
        .with("cross-origin-opener-policy", "same-origin")
        .with("cross-origin-resource-policy", "same-origin")
}

pub fn redirect(to: &str) -> Response {
    headers(Response::new(303, "text/plain; charset=utf-8", Vec::new())).with("location", to)
}

/// A page that asks for an address again, now from within this site.
pub fn once_more(assets: &Assets, address: &str) -> Response {
    let content = html! {
        main.narrow {
            h1 { "One moment" }
            p { "If nothing happens, " a href=(address) { "go on to the page" } "." }
        }
    };
    outside(assets, 200, "One moment", &content).with("refresh", format!("0; url={address}"))
}

/// What the console shows until there is a password.
pub fn no_password(assets: &Assets, command: &str) -> Response {
    let content = html! {
        main.narrow {
            h1 { "Set a password first" }
            p { "The console opens once it has a password. On the machine that the service runs on, as the user that \
                 it runs as:" }
            (copied("Command", "command", command))
            p.muted { "At least 12 characters; takes effect immediately. Then " a href="/" { "load this page again" } "." }
        }
    };
    outside(assets, 200, "Set a password first", &content)
}

pub fn busy(console: &Console) -> Response {
    let told = "Try again in a moment. Completions are not affected.";
    message(console, None, 503, "The console is busy", told).with("retry-after", "1")
}

pub fn broken(console: &Console) -> Response {
    let told = "The service’s log has the reason. Completions are not affected.";
    message(console, None, 503, "Something went wrong", told).with("retry-after", "5")
}

pub fn stopped(
    console: &Console,
    session: Option<&ConsoleSession>,
    client: ClientInfo,
    stop: &PageError,
) -> Response {
    let (status, title, told) = match stop {
        PageError::NotFound => (404, "Page not found", "Check the address."),
        PageError::Method => (405, "Not possible here", "Nothing was changed."),
        PageError::TooLarge => (413, "The form is too large", "It has more than 16 KiB."),
        PageError::Stale => (
            403,
            "The form was too old",
            "You have signed in again since it was shown. Nothing was changed. Go back, load the page again and \
             repeat the change.",
        ),
        PageError::Foreign => (
            403,
            "The form came from elsewhere",
            "Another site's page sent it. Nothing was changed. If you did not intend this, contact the operator of that site.",
        ),
        PageError::Wait(_) => (429, "Too many requests", "Try again in a moment."),
        PageError::Store(error) => {
            // Without the database, nobody is known to be signed in.
            if logging::allow_stranger(error.cause(), client.peer) {
                log::error!("console: {error}");
            }
            let told = "It can’t be read or written at the moment. The service’s log has the reason.";
            (503, "The database does not answer", told)
        }
    };
    let response = message(console, session, status, title, told);
    match stop {
        PageError::Method => response.with("allow", "GET, POST"),
        PageError::Wait(time) => response.with("retry-after", time.as_secs().max(1).to_string()),
        PageError::Store(_) => response.with("retry-after", "5"),
        _ => response,
    }
}

/// A page with one message. Who is signed in keeps the navigation.
fn message(
    console: &Console,
    session: Option<&ConsoleSession>,
    status: u16,
    title: &str,
    told: &str,
) -> Response {
    let content = html! {
        main.narrow {
            h1 { (title) }
            p { (told) }
            p { a href="/" { "Back to API keys" } }
        }
    };
    match session {
        Some(session) => signed_in(console, session, None, status, title, &content),
        None => outside(&console.assets, status, title, &content),
    }
}

/// A text to be copied; the button is there where a script is.
pub fn copied(title: &str, id: &str, text: &str) -> Markup {
    html! {
        div.copy {
            h2 { (title) }
            pre tabindex="0" aria-label=(title) { code id=(id) { (text) } }
            button type="button" data-copy=(id) hidden { "Copy" }
        }
    }
}

/// The hidden part of every form.
pub fn form_token(session: &ConsoleSession) -> Markup {
    html! { input type="hidden" name="token" value=(session.form_token()); }
}

/// A time to the minute, or to the second. A script shows the local time in a tooltip.
pub fn time(unix: i64, seconds: bool) -> Markup {
    shown(unix, if seconds { 19 } else { 16 })
}

/// The day of a time, which the script tells whole.
pub fn date(unix: i64) -> Markup {
    shown(unix, 10)
}

fn shown(unix: i64, length: usize) -> Markup {
    match when::iso(unix) {
        Some(exact) => html! { time datetime=(exact) { (exact[..length].replace('T', " ")) } },
        None => html! { "–" },
    }
}

/// A time that something took, in the unit that fits it.
pub fn took(milliseconds: f64) -> String {
    match milliseconds {
        ms if ms < 9.95 => format!("{:.1} ms", ms.max(0.0)),
        ms if ms < 999.5 => format!("{ms:.0} ms"),
        ms if ms < 99_950.0 => format!("{:.1} s", ms / 1000.0),
        ms => format!("{} min", grouped((ms / 60_000.0).round() as i64)),
    }
}

/// A percentile to two digits: the histogram does not know more.
pub fn rounded(milliseconds: f64) -> String {
    let unit = 10_f64.powf(milliseconds.max(0.1).log10().floor() - 1.0);
    let value = (milliseconds / unit).round() * unit;
    if (10_000.0..100_000.0).contains(&value) { format!("{:.0} s", value / 1000.0) } else { took(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_counts() {
        assert_eq!(
            time(978_307_261, false).into_string(),
            "<time datetime=\"2001-01-01T00:01:01Z\">2001-01-01 00:01</time>"
        );
        assert_eq!(time(i64::MAX, true).into_string(), "–");
        assert_eq!(
            (count(1, "request"), count(2_000, "request")),
            ("1 request".into(), "2,000 requests".into())
        );
        for (ms, text) in
            [(0.04, "0.0 ms"), (7.26, "7.3 ms"), (42.4, "42 ms"), (1_234.0, "1.2 s"), (600_000.0, "10 min")]
        {
            assert_eq!(took(ms), text);
        }
        for (ms, text) in
            [(0.0, "0.0 ms"), (0.26, "0.3 ms"), (7.26, "7.3 ms"), (126.0, "130 ms"), (12_345.0, "12 s")]
        {
            assert_eq!(rounded(ms), text);
        }
    }
}
