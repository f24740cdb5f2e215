//! The listener alone, when connections or memory run out: the address that holds most gives way, and the others go on.

use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Instant;

use adriaticum::listener::LoadEvent;

use crate::limits::{ENOUGH, get, post, serve};
use crate::support::{Client, connect_from, until};
use crate::tls::{self, hold_the_loop, serve_tls};

#[test]
fn all_buffers_together_have_a_bound() {
    let running = serve(|limits| limits.buffered_bytes = 600_000);
    let mut first = running.connect();
    first.send(post(200_000, 199_999));
    until("the bytes are buffered", || running.get("/") == 200);
    let mut second = running.connect();
    second.send(post(250_000, 249_999));
    until("both are buffered", || running.buffered_bytes() >= 449_998);
    let mut third = running.connect();
    third.send(post(250_000, 249_999));
    // It grew past the limit: the oldest of the address is evicted, and the others continue.
    let shed = first.reply();
    assert_eq!((shed.status, first.ends()), (503, true));
    running.has_counted(LoadEvent::UnfinishedEvicted, 1);
    running.has_counted(LoadEvent::BuffersFull, 0);
    // The loop reports its buffers at the end of its round, after the answer.
    until("the rest is counted", || {
        (499_998..600_000).contains(&running.buffered_bytes())
    });
    // When the body is complete, the whole cost of the request is counted. To evict the other one would not be enough.
    assert_eq!(second.ask("x").status, 503);
    running.has_counted(LoadEvent::UnfinishedEvicted, 1);
    running.has_counted(LoadEvent::BuffersFull, 1);
    // For this one it is.
    let mut fourth = running.connect();
    fourth.send(post(150_000, 150_000));
    assert_eq!((fourth.reply().status, third.reply().status), (200, 503));
    running.has_counted(LoadEvent::UnfinishedEvicted, 2);
    running.has_counted(LoadEvent::BuffersFull, 1);
    until("nothing is buffered", || running.buffered_bytes() < 100_000);
}

#[test]
fn an_idle_session_gives_way_to_a_request() {
    let (running, connect) = serve_tls(|limits| limits.buffered_bytes = 1_200_000);
    let mut idle: Vec<tls::Secured> = (0..50).map(|_| connect()).collect();
    let mut client = connect();
    assert_eq!(client.ask(post(250_000, 250_000)).status, 200);
    running.has_counted(LoadEvent::BuffersFull, 0);
    running.has_counted(LoadEvent::Rejected, 0);
    assert!(
        (1..50).contains(&running.counted(LoadEvent::IdleEvicted)),
        "{:?}",
        running.state.snapshot()
    );
    assert!(idle[0].ends(), "the longest idle is the first to go");
    assert_eq!(idle[49].ask(get("/")).status, 200);
}

/// A stop reads what has arrived on every connection. What it reads on the first may evict the second.
#[test]
fn a_session_is_evicted_during_a_stop() {
    let (mut running, connect) = serve_tls(|limits| limits.buffered_bytes = 60_000);
    let [mut growing, mut idle, mut broken] = hold_the_loop(&running, connect, "");
    // The stop comes first, so that the loop reads these bytes while it stops.
    running.stopper.write_all(b"x").expect("it can be stopped");
    growing.send(post(250_000, 50_000));
    running.release_loop();
    assert_eq!(broken.reply().status, 400);
    assert_eq!(growing.reply().status, 503);
    assert!(idle.ends());
    assert_eq!(running.counted(LoadEvent::UnfinishedEvicted), 1);
}

/// Two connections expire at the same time. The refusal of the first may evict the second.
#[test]
fn a_session_is_evicted_when_it_has_expired() {
    let refusal = 8 * 1024 * 1024;
    // Room for the refusal, what is encrypted of it, and one session.
    let buffered_bytes = refusal + 80_000;
    let (running, connect) = serve_tls(|limits| {
        limits.buffered_bytes = buffered_bytes;
        limits.idle_time = ENOUGH;
        limits.request_time = ENOUGH;
    });
    let [mut growing, mut idle, mut broken] = hold_the_loop(&running, connect, "GET / HT");
    let began = Instant::now();
    running.echo.refusal_bytes.store(refusal, Ordering::Release);
    until("both have expired", || began.elapsed() > ENOUGH);
    running.release_loop();
    assert_eq!(broken.reply().status, 400);
    assert!(idle.ends());
    assert_eq!(growing.reply().status, 400);
}

/// Two addresses hold all connections in silence, and reopen what is closed. Once they evicted every upload and every idle
/// connection of the others.
#[test]
fn the_largest_holder_gives_way_although_it_is_idle() {
    let running = serve(|limits| limits.max_connections = 8);
    let (mut upload, mut kept) = (running.connect_elsewhere(), running.connect_elsewhere());
    upload.send(post(2, 1));
    assert_eq!(kept.ask(get("/")).status, 200);
    let flood: Vec<Client> = (0..30)
        .map(|number| running.hold_from(3 + number % 2))
        .collect();
    assert_eq!(
        running.counted(LoadEvent::IdleEvicted),
        30 - 6,
        "they evict one another"
    );
    upload.send("x");
    kept.send(get("/"));
    assert_eq!((upload.reply().status, kept.reply().status), (200, 200));
    running.has_counted(LoadEvent::UnfinishedEvicted, 0);
    running.has_counted(LoadEvent::Rejected, 0);
    drop(flood);
}

#[test]
fn an_address_loses_its_longest_idle_connection_first_and_then_its_oldest_request() {
    let running = serve(|limits| limits.max_connections = 6);
    let mut other = running.connect_elsewhere();
    // When a later request is answered, what came before is read.
    let mut unfinished = || {
        let mut client = running.hold_from(3);
        client.send("P");
        assert_eq!(other.ask(get("/")).status, 200);
        client
    };
    let mut requests = vec![unfinished()];
    let mut idle = [running.hold_from(3), running.hold_from(3)];
    // The address has its half: each of these evicts one of its own.
    for client in &mut idle {
        requests.push(unfinished());
        assert!(client.ends());
    }
    requests.push(unfinished());
    assert_eq!(requests[0].reply().status, 503);
    running.has_counted(LoadEvent::IdleEvicted, 2);
    running.has_counted(LoadEvent::UnfinishedEvicted, 1);
}

#[test]
fn running_requests_count_as_held_and_are_not_evicted() {
    let running = serve(|limits| limits.max_connections = 6);
    let mut busy = [running.connect_from(3), running.connect_from(3)];
    for client in &mut busy {
        client.send(get("/hold"));
    }
    running.until_under_way(2);
    let mut others = [
        running.hold_from(4),
        running.hold_from(4),
        running.hold_from(5),
    ];
    let mut third = running.hold_from(3);
    let _new = running.hold_from(6);
    assert!(third.ends(), "its address has three connections");
    let _newer = running.hold_from(7);
    assert!(
        others[0].ends(),
        "nothing of the largest holder can be evicted, so the next one gives way"
    );
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut busy {
        assert_eq!(client.reply().status, 200);
    }
    running.has_counted(LoadEvent::IdleEvicted, 2);
    running.has_counted(LoadEvent::Rejected, 0);
    for client in &mut others[1..] {
        assert_eq!(client.ask(get("/")).status, 200);
    }
}

/// 20 large bodies that are never finished fill the memory. Another address's requests get through.
#[test]
fn unfinished_bodies_of_the_busiest_address_make_room() {
    let running = serve(|limits| limits.buffered_bytes = 2_000_000);
    let mut flood: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = running.connect();
            client.send(post(250_000, 249_999));
            client
        })
        .collect();
    for _ in 0..10 {
        let mut honest = running.connect_elsewhere();
        assert_eq!(honest.ask(post(200_000, 200_000)).status, 200);
    }
    assert_eq!(running.counted(LoadEvent::BuffersFull), 0);
    assert_eq!(flood[0].reply().status, 503);
    assert!(running.counted(LoadEvent::UnfinishedEvicted) >= 12);
}

#[test]
fn without_a_victim_a_new_connection_is_turned_away_with_a_response() {
    let running = serve(|limits| limits.max_connections = 2);
    let mut busy = [running.connect(), running.connect_elsewhere()];
    for client in &mut busy {
        client.send(get("/hold"));
    }
    running.until_under_way(2);
    for number in 1..=2 {
        let mut new = Client::new(connect_from([127, 0, 0, number], running.address));
        let reply = new.ask(get("/"));
        assert_eq!(
            (reply.status, reply.header("connection")),
            (503, Some("close"))
        );
        assert!(new.ends());
        assert_eq!(running.counted(LoadEvent::Rejected), u64::from(number));
    }
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut busy {
        assert_eq!(client.reply().status, 200);
    }
    assert_eq!(running.get("/"), 200);
}

/// Clients that do not read their responses hold connections and memory until others need them.
#[test]
fn a_response_that_is_not_read_gives_way() {
    let running = serve(|limits| {
        limits.max_connections = 4;
        limits.buffered_bytes = 40 * 1024 * 1024;
    });
    let unread = |host: u8| {
        let mut client = running.connect_from(host);
        let before = running.buffered_bytes();
        client.send(get("/large"));
        // The system's buffers take some of it.
        until("it is not sent", || {
            running.buffered_bytes() > before + 4 * 1024 * 1024
        });
        client
    };
    let mut slow: Vec<Client> = [3, 3, 4].map(unread).into();
    let mut honest = running.connect_elsewhere();
    assert_eq!(honest.ask(post(200_000, 200_000)).status, 200);
    assert_eq!(
        running.counted(LoadEvent::UnfinishedEvicted),
        0,
        "there was room"
    );
    let mut new = running.connect_from(5);
    assert_eq!(new.ask(get("/")).status, 200);
    assert_eq!(running.counted(LoadEvent::UnfinishedEvicted), 1);
    assert!(
        slow[0].reply().body.len() < 8 * 1024 * 1024,
        "the oldest of the address that holds most"
    );
    assert_eq!(
        slow[1].reply().body.len(),
        8 * 1024 * 1024,
        "the others get theirs when they read"
    );
    assert_eq!(slow[2].reply().body.len(), 8 * 1024 * 1024);

    let running = serve(|limits| limits.buffered_bytes = 20 * 1024 * 1024);
    let mut slow: Vec<Client> = (0..3).map(|_| running.connect_from(3)).collect();
    slow.iter_mut()
        .for_each(|client| client.send(get("/large")));
    until("one is evicted", || {
        running.counted(LoadEvent::UnfinishedEvicted) >= 1
    });
    for _ in 0..10 {
        let mut honest = running.connect_elsewhere();
        assert_eq!(honest.ask(post(250_000, 250_000)).status, 200);
    }
    assert_eq!(running.counted(LoadEvent::BuffersFull), 0);
}
