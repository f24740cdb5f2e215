//! Signing in to the console while strangers guess the password or flood the sign-in page.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

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
    browser
        .cookies
        .retain(|(name, _)| name != "adriaticum_session");
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
    own.cookies.retain(|(name, _)| name == "adriaticum_browser");
    assert_eq!(own.get("/keys").status, 303, "its token gives no access");
    assert_eq!(own.get("/sign-in").status, 200);
    assert_eq!(guess(&mut own), 5, "and its attempts are limited");
}

#[test]
fn a_client_on_this_host_has_attempts_of_its_own() {
    let server = with_console(None);
    let mut stranger = visitor(&server, ELSEWHERE);
    let refused = (1..255).find(|&last| {
        stranger.source = [127, 0, 1, last];
        attempt(&mut stranger, "a wrong password") == 429
    });
    assert!(
        refused.is_some(),
        "strangers have one budget, however many addresses they use"
    );
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
fn a_form_that_was_sent_after_the_end_of_the_session_keeps_what_was_typed() {
    let server = with_console(None);
    server.stdout_of(&["keys", "create", "first"]);
    let mut own = known_browser(&server, ELSEWHERE);
    let list = own.get("/keys").text();
    let key = list.split("href=\"/keys/key_").nth(1).expect("a key")[..16].to_owned();
    let end_session =
        || server.query("UPDATE console_tokens SET expires = 1 WHERE kind = 'session' RETURNING 1");
    let back_after_sign_in = |own: &mut Browser, to: &str| {
        let page = own.get(to).text();
        let next = page
            .split("name=\"next\" value=\"")
            .nth(1)
            .expect("the field")
            .split('"')
            .next();
        let next = next.expect("its end").replace("&amp;", "&");
        let reply = own.post("/sign-in", &[("password", PASSWORD), ("next", &next)]);
        assert_eq!(
            (reply.status, reply.header("location")),
            (303, Some(next.as_str()))
        );
        (page, next)
    };
    let typed = [
        ("name", "\"Ana’s\" <laptop>"),
        ("permission", "metrics"),
        ("expires", "date"),
        ("date", "2099-01-01"),
        ("concurrent", "7"),
        ("budget", "20,000"),
        ("budget_per", "day"),
        ("once", "0123456789abcdef0123456789abcdef"),
        ("loaded", "1"),
    ];
    let kept = [
        "value=\"&quot;Ana’s&quot; &lt;laptop&gt;\"",
        "value=\"metrics\" checked",
        "value=\"date\" selected",
        "value=\"2099-01-01\"",
        "value=\"7\"",
        "value=\"20,000\"",
        "value=\"day\" selected",
        "nothing was saved",
    ];
    let change = format!("/keys/key_{key}?sort=name&page=2");
    for path in ["/keys", &change] {
        own.get("/keys");
        end_session();
        let reply = own.post(path, &typed);
        let to = reply
            .header("location")
            .expect("the sign-in page")
            .to_owned();
        assert!(
            to.starts_with("/sign-in?ended=form&next=") && !to.contains("once"),
            "{to}"
        );
        let (page, next) = back_after_sign_in(&mut own, &to);
        assert!(page.contains("the change was not saved"), "{page}");
        let page = own.get(&next).text();
        for part in kept {
            assert!(
                path != "/keys" && part == "nothing was saved" || page.contains(part),
                "{part}: {page}"
            );
        }
        // A version of the key came with the form, and it is not this one.
        assert_eq!(
            page.contains("The key was changed since"),
            path != "/keys",
            "{page}"
        );
        assert_eq!(
            page.contains("/keys?sort=name&amp;page=2"),
            path != "/keys",
            "{page}"
        );
        // Without the browser's token it is the link of another site.
        let foreign = next.split("&typed=").next().expect("an address").to_owned();
        for address in [
            foreign.clone(),
            format!("{foreign}&typed={}", "0".repeat(64)),
        ] {
            let page = own.get(&address).text();
            assert!(
                page.contains("name=\"budget\"") && !page.contains("&lt;laptop"),
                "{page}"
            );
        }
    }
    assert_eq!(
        server.query("SELECT id FROM keys").len(),
        1,
        "nothing was saved"
    );

    // In another tab the operator has signed in again.
    let stale = own.post_with_token("/keys", "0", &typed);
    let text = stale.text();
    let form = text
        .split("href=\"/keys/new?")
        .nth(1)
        .expect("the form")
        .split('"')
        .next()
        .expect("its end");
    assert_eq!(stale.status, 403);
    assert!(
        own.get(&format!("/keys/new?{}", form.replace("&amp;", "&")))
            .text()
            .contains(kept[0])
    );

    // Neither a secret nor what is too long is in an address.
    let secret = format!("adr_{}", "0123456789abcdef".repeat(3));
    for name in [secret, "x".repeat(3000)] {
        own.get("/keys");
        end_session();
        let to = own
            .post("/keys", &[("name", &name), ("loaded", "1")])
            .header("location")
            .expect("a page")
            .to_owned();
        assert!(
            !to.contains("0123456789abcdef0123456789") && to.len() < 1000,
            "{to}"
        );
        back_after_sign_in(&mut own, &to);
    }

    // A page that was only looked at says no more than that.
    own.get("/keys");
    end_session();
    let to = own
        .get("/usage?range=7d")
        .header("location")
        .expect("the sign-in page")
        .to_owned();
    assert_eq!(to, "/sign-in?ended=page&next=%2Fusage%3Frange%3D7d");
    let page = own.get(&to).text();
    assert!(
        page.contains("Your session ended. Sign in again.") && !page.contains("saved"),
        "{page}"
    );
    let to = own
        .post("/sign-out", &[])
        .header("location")
        .expect("a page")
        .to_owned();
    assert_eq!(to, "/sign-in?ended=page", "nothing is lost");
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
