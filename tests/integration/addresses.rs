//! No address that a person can type makes a page of the console panic.

use crate::console::{Browser, with_console};
use crate::support::{Runtime, chat};

/// The pages, and their parameters. The exports share theirs with the first two.
const PAGES: [(&str, &str); 11] = [
    ("/usage", "range from to key gateway outcome by sort page"),
    (
        "/requests",
        "range from to key gateway outcome cause least most before after",
    ),
    ("/usage/totals.csv", "from to"),
    ("/requests/export.csv", "from to"),
    ("/requests/find", "id"),
    ("/keys", "q state sort page changed revoked created key"),
    ("/keys/new", "name expires once"),
    ("/audit", "before about page key"),
    ("/status", "x"),
    ("/sign-in", "next ended"),
    ("/", "x"),
];

const TIMES: &str = "9999-12-31 9999-12-31T23:59:59 9999-12-31T23:59-14:00 0000-01-01 0001-01-01T00:00%2B14:00 \
    -9999-01-01 -9999-01-01T00:00%2B14:00 1969-12-31 1970-01-01 1970-01-01T00:00%2B14:00 2000-02-30 2000-02-29T24:00 \
    2000-02-29T12:34:56 2024-01-01 2070-01-01 10000-01-01 12:00 30d yesterday";

const VALUES: &str = "0 1 -1 1e9 4294967295 4294967296 9223372036854775807 9223372036854775808 18446744073709551615 \
    99999999999999999999999 1h all last-month 9999999d key_0000000000000000 key_%C3%A9 failed \
    chatcmpl_00000000000000000000000000000000 chatcmpl_ffffffffffffffffffffffffffffffff \
    audit_ffffffffffffffffffffffffffffffff -tokens %00 %ff%fe %F0%9F%A6%80%E2%80%AE%22%3E%27 %25%73%7B%7D%5C%2e%2e%2f";

#[test]
fn no_address_panics() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    server.post(&server.key(), &chat("x")).is_completion();
    let mut browser = Browser::signed_in(&server);
    let long = "9".repeat(4000);
    let values = |list: &'static str| list.split(' ').chain([""]);
    let mut addresses: Vec<String> = Vec::new();
    for (page, names) in PAGES {
        for name in names.split(' ') {
            let values = match name {
                "from" | "to" => values(TIMES),
                _ => values(VALUES),
            };
            let values = values.chain([long.as_str()]);
            addresses.extend(values.map(|value| format!("{page}?{name}={value}")));
        }
    }
    for from in values(TIMES) {
        addresses.extend(values(TIMES).map(|to| format!("/usage?from={from}&to={to}")));
        addresses.extend(values(TIMES).map(|to| format!("/requests?by=day&range={from}..{to}")));
    }
    for value in values(VALUES).chain(values(TIMES)) {
        for place in [
            "/keys/{}",
            "/keys/{}/revoke",
            "/requests/{}",
            "/usage/{}",
            "/{}",
        ] {
            addresses.push(place.replace("{}", value));
        }
    }
    for address in addresses {
        let reply = browser.get(&address);
        assert!(
            [200, 303, 400, 404].contains(&reply.status),
            "{address}: {}",
            reply.head
        );
    }
    assert!(!server.log().contains("panicked"), "{}", server.log());
    let page = browser.get("/usage?from=9999-12-31");
    assert!(
        page.status == 400 && page.text().contains("in the future"),
        "{}",
        page.text()
    );
    let page = browser.get("/usage?from=1970-01-01&to=2070-01-01");
    assert!(
        page.status == 400 && page.text().contains("longer than ten years"),
        "{}",
        page.text()
    );
}
