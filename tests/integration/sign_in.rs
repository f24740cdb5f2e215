//! Signing in to the console while strangers guess the password or flood the sign-in page.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use rusqlite::types::Value;
use rustix::process::Signal;

use crate::console::{Browser, PASSWORD, set_password, with_console};
use crate::support::{PATIENCE, Server};

/// Another address of this host has to be chosen, so it counts as a stranger's.
const ELSEWHERE: [u8; 4] = [127, 0, 0, 3];

fn browser_at(server: &Server, source: [u8; 4]) -> Browser<'_> {
    let mut browser = Browser::new(server);
    browser.source = source;
    browser
}

/// A browser at the sign-in page.
fn visitor(server: &Server, source: [u8; 4]) -> Browser<'_> {
    let mut browser = browser_at(server, source);
    assert_eq!(browser.get("/sign-in").status, 200);
    browser
}

fn known_browser(server: &Server, source: [u8; 4]) -> Browser<'_> {
    let mut browser = visitor(server, source);
    assert_eq!(attempt(&mut browser, PASSWORD), 303);
    browser
}

/// Tries a password, and returns the status.
fn attempt(browser: &mut Browser, password: &str) -> u16 {
    browser.post("/sign-in", &[("password", password)]).status
}

/// Guesses until it has to wait, and returns how many guesses were answered.
fn guess(browser: &mut Browser) -> usize {
    (0..100)
        .take_while(|_| attempt(browser, "a wrong password") == 401)
        .count()
}

/// The whole way from the sign-in page to the keys, without a session. Returns the statuses.
fn sign_in(browser: &mut Browser, password: &str) -> [u16; 3] {
    browser.post("/sign-out", &[]);
    [
        browser.get("/sign-in").status,
        attempt(browser, password),
        browser.get("/keys").status,
    ]
}

#[test]
fn a_browser_is_known_after_a_change_of_the_password() {
    const ANOTHER: &str = "another password than before";
    let server = with_console(None);
    let mut own = known_browser(&server, ELSEWHERE);
    assert_eq!(own.get("/keys").status, 200);
    assert!(set_password(&server, ANOTHER).status.success());
    assert_eq!(own.get("/keys").status, 303, "the session has ended");
    let mut guesser = visitor(&server, ELSEWHERE);
    assert_eq!(guess(&mut guesser), 5);
    assert_eq!(
        attempt(&mut guesser, ANOTHER),
        429,
        "the address has to wait"
    );
    assert_eq!(
        sign_in(&mut own, PASSWORD),
        [200, 401, 303],
        "a known browser needs the password too"
    );
    assert_eq!(sign_in(&mut own, ANOTHER), [200, 303, 200]);
    own.post("/sign-out", &[]);
    assert_eq!(own.get("/keys").status, 303, "its cookie gives no access");
    assert_eq!(own.get("/sign-in").status, 200);
    assert_eq!(guess(&mut own), 5, "and its attempts are limited");
}

#[test]
fn strangers_lock_out_neither_a_known_browser_nor_a_client_on_this_host() {
    let server = with_console(None);
    let mut known = known_browser(&server, ELSEWHERE);
    let mut stranger = visitor(&server, ELSEWHERE);
    let refused = (1..255).find(|&last| {
        stranger.source = [127, 0, 1, last];
        attempt(&mut stranger, "a wrong password") == 429
    });
    assert!(
        refused.is_some(),
        "strangers have one budget, however many addresses they use"
    );
    assert_eq!(sign_in(&mut known, PASSWORD), [200, 303, 200]);
    let mut local = visitor(&server, [127, 0, 0, 1]);
    assert_eq!(sign_in(&mut local, PASSWORD), [200, 303, 200]);
    let mut guesser = visitor(&server, [127, 0, 0, 1]);
    assert_eq!(
        guess(&mut guesser),
        5,
        "a user of this host has to wait too"
    );
    assert_eq!(
        sign_in(&mut local, PASSWORD),
        [200, 303, 200],
        "it is known now"
    );
}

#[test]
fn a_form_that_was_sent_after_the_end_of_the_session_leads_back_to_its_page() {
    let server = with_console(None);
    server.stdout_of(&["keys", "create", "first"]);
    let mut own = known_browser(&server, ELSEWHERE);
    let list = own.get("/keys").text();
    let key = list.split("href=\"/keys/key_").nth(1).expect("a key")[..16].to_owned();
    let key = format!("/keys/key_{key}");
    let change = format!("{key}?sort=name&page=2");
    let end_session =
        || server.query("UPDATE console_browsers SET session_ends = NULL RETURNING 1");
    let form = [
        ("name", "never saved"),
        ("permission", "metrics"),
        ("once", "0123456789abcdef0123456789abcdef"),
    ];
    for (path, back) in [
        ("/keys", "/keys/new"),
        (&change, &change),
        (&format!("{key}/revoke"), &format!("{key}/revoke")),
    ] {
        end_session();
        let reply = own.post(path, &form);
        let to = reply.header("location").expect("the sign-in page");
        assert!(
            to.starts_with("/sign-in?ended=form&next=") && !to.contains("never"),
            "{to}"
        );
        let page = own.get(to).text();
        assert!(page.contains("the change was not saved"), "{page}");
        let next = page.split("name=\"next\" value=\"").nth(1);
        let next = next.and_then(|rest| rest.split('"').next());
        let next = next.expect("the field").replace("&amp;", "&");
        assert_eq!(next, back);
        let reply = own.post("/sign-in", &[("password", PASSWORD), ("next", &next)]);
        assert_eq!(reply.header("location"), Some(back));
        let page = own.get(back);
        assert_eq!(page.status, 200);
        assert!(!page.text().contains("never saved"), "{}", page.text());
    }
    let keys = server.query("SELECT name, revoked FROM keys");
    let [ref row] = keys[..] else {
        panic!("nothing was created: {keys:?}")
    };
    assert_eq!(row[..], ["first".to_owned().into(), Value::Null]);

    // A page that was only looked at says no more than that.
    end_session();
    let reply = own.get("/usage?range=7d");
    let to = reply.header("location").expect("the sign-in page");
    assert_eq!(to, "/sign-in?ended=page&next=%2Fusage%3Frange%3D7d");
    let page = own.get(to).text();
    assert!(
        page.contains("Your session ended. Sign in again.") && !page.contains("saved"),
        "{page}"
    );
    let reply = own.post("/sign-out", &[]);
    let to = reply.header("location");
    assert_eq!(to, Some("/sign-in?ended=page"), "nothing is lost");
}

/// One password is verified at a time. An attempt meanwhile got 429.
#[test]
fn sign_ins_wait_for_each_other() {
    let server = with_console(None);
    let browsers: Vec<Browser> = (0..6).map(|_| known_browser(&server, ELSEWHERE)).collect();
    let barrier = Barrier::new(browsers.len());
    let at_once = |mut browser: Browser| {
        barrier.wait();
        attempt(&mut browser, PASSWORD)
    };
    thread::scope(|scope| {
        let running: Vec<_> = browsers
            .into_iter()
            .map(|browser| scope.spawn(|| at_once(browser)))
            .collect();
        for running in running {
            assert_eq!(running.join().expect("a status"), 303);
        }
    });
}

/// The strangers took all places in the console's queue.
#[test]
fn twenty_connections_on_the_sign_in_page_do_not_keep_the_operator_out() {
    let mut server = with_console(None);
    let cookies = known_browser(&server, ELSEWHERE).cookies;
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let server = server.start();
    let is_over = AtomicBool::new(false);
    let end = Instant::now() + PATIENCE;
    let flood = |guesses: bool| {
        let mut stranger = browser_at(&server, [127, 0, 0, 2]);
        while !is_over.load(Ordering::Acquire) && Instant::now() < end {
            stranger.get("/sign-in");
            if guesses {
                attempt(&mut stranger, "a wrong password");
            }
        }
    };
    let outcomes = thread::scope(|scope| {
        (0..20).for_each(|number| _ = scope.spawn(move || flood(number % 2 == 0)));
        let mut own = browser_at(&server, ELSEWHERE);
        own.cookies = cookies;
        let own = (0..8)
            .map(|_| sign_in(&mut own, PASSWORD))
            .collect::<Vec<_>>();
        let new = (0..8)
            .map(|_| sign_in(&mut Browser::new(&server), PASSWORD))
            .collect::<Vec<_>>();
        is_over.store(true, Ordering::Release);
        own.into_iter().chain(new)
    });
    assert!(
        outcomes.clone().all(|outcome| outcome == [200, 303, 200]),
        "{:?}",
        outcomes.collect::<Vec<_>>()
    );
}
