//! The layout that all pages share: frame, navigation and headers.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::html::assets::{ICON, SCRIPT, STYLE};
use super::page::Operator;
use super::status::verdict;
use crate::http::Response;
use crate::when::Zone;

/// Allows nothing but what this host serves, no script or style within a page, and no frame around
/// it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; \
    form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The parts of the console in the navigation: their addresses and names.
const PARTS: [(&str, &str); 5] = [
    ("/keys", "API Keys"),
    ("/usage", "Usage"),
    ("/requests", "Requests"),
    ("/status", "Status"),
    ("/audit", "Audit"),
];

/// A page for a signed-in operator, with the navigation. `part` is the address of the part that it
/// belongs to.
pub fn operator_page(
    operator: &Operator,
    status: u16,
    part: &str,
    title: &str,
    content: &Markup,
) -> Response {
    let console = operator.console;
    let trouble = verdict::trouble(&verdict::parts(console));
    let gateway = console.config.gateway_name();
    let dot = if trouble.is_some() { "● " } else { "" };
    let top = html! {
        span.gateway.text { (gateway) }
        nav aria-label="Console" {
            ul {
                @for (address, name) in PARTS {
                    li { a href=(address) aria-current=[(address == part).then_some("page")] {
                        (name)
                        @if address == "/status" && let Some(trouble) = &trouble { " " span class=(format!("dot {}", trouble.class)) { span.unseen { "(" (trouble.words) ")" } } }
                    } }
                }
            }
        }
        form.out method="post" action="/sign-out" {
            button.quiet type="submit" { "Sign out" }
        }
    };
    let title = format!("{dot}{title} · {gateway}");
    frame(status, &title, &top, content, Some(&console.store.zone))
}

/// A page that needs no session.
pub fn plain_page(status: u16, title: &str, content: &Markup) -> Response {
    frame(status, title, &html! {}, content, None)
}

/// The zone is that of the times in the content.
fn frame(
    status: u16,
    title: &str,
    top: &Markup,
    content: &Markup,
    zone: Option<&Zone>,
) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Adriaticum" }
                link rel="icon" href=(ICON.path) type="image/svg+xml";
                link rel="stylesheet" href=(STYLE.path);
                script src=(SCRIPT.path) defer {}
            }
            body {
                a.skip href="#content" { "Skip to the content" }
                header {
                    a.brand href="/" { (MARK) "Adriaticum" }
                    (top)
                }
                div #content { (content) }
                footer { p {
                    "Adriaticum " (env!("ADRIATICUM_VERSION"))
                    @if let Some(zone) = zone { " · Time zone: " (zone.name()) }
                } }
            }
        }
    };
    headers(Response::new(
        status,
        "text/html; charset=utf-8",
        page.into_string().into_bytes(),
    ))
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
        .with("referrer-policy", "same-origin")
        .with("cross-origin-opener-policy", "same-origin")
        .with("cross-origin-resource-policy", "same-origin")
}

pub fn redirect(to: &str) -> Response {
    headers(Response::new(303, "text/plain; charset=utf-8", Vec::new())).with("location", to)
}

/// A text with a button that copies it. The script makes the button visible.
pub fn copy_box(title: &str, id: &str, text: &str) -> Markup {
    html! {
        div.copy {
            h2 { (title) }
            pre tabindex="0" aria-label=(title) { code id=(id) { (text) } }
            button type="button" data-copy=(id) hidden { "Copy" }
        }
    }
}
