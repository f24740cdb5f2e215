//! The audit page: every change of keys, settings and the password, and the sign-ins.

use maud::html;

use super::filters;
use super::page::{Operator, PageResult};
use crate::audit::AuditSubject;
use crate::report::rows;
use crate::report::{choices, page_links};

const ROWS_PER_PAGE: usize = 50;

const SUBJECTS: [(&str, &str); 4] = [
    ("", "All"),
    (AuditSubject::Keys.as_str(), "Keys"),
    (AuditSubject::SignIns.as_str(), "Sign-ins"),
    (AuditSubject::Settings.as_str(), "Settings"),
];

pub fn page(operator: &Operator) -> PageResult {
    let (store, query) = (&operator.console.store, filters::query(operator, "/audit")?);
    let before = Some(query.get("before")).filter(|id| !id.is_empty());
    // With one row more than a page has, it is known whether there is another page.
    let mut rows = store
        .audit
        .newest(query.about(), before, ROWS_PER_PAGE as i64 + 1)?;
    let has_more = rows.len() > ROWS_PER_PAGE;
    rows.truncate(ROWS_PER_PAGE);
    let to = |id: &str| query.link("/audit", &[("before", id)]);
    let newest = before.map(|_| ("← Newest", to("")));
    let earlier = rows.last().filter(|_| has_more);
    let earlier = earlier.map(|last| ("Earlier changes →", to(&last.id)));
    let subjects = SUBJECTS.into_iter().map(|(word, name)| {
        let address = query.link("/audit", &[("about", word)]);
        (address, name, word == query.get("about"))
    });
    let content = html! {
        main {
            h1 { "Audit" }
            div.filters { (choices("About", subjects)) }
            p.muted { "Every change, the newest first. Failed sign-ins are summed for up to 15 minutes." }
            @if rows.is_empty() {
                section.empty { h2 { "No rows" } p { "None matches." } }
            } @else {
                (rows::audit(&rows, &store.zone).html("audit", "time,action,by,key,details"))
            }
            (page_links(newest.as_slice(), "", earlier))
        }
    };
    Ok(operator.page("Audit", &content))
}
