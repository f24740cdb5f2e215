//! The engine against a real server, with connections that break at the worst moment.

mod round_trips;
mod schema_upgrades;

use std::io::{Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use super::*;
use crate::audit::Actor;
use crate::console::session::credentials;
use crate::console::session::credentials::{PasswordHash, TokenKind};
use crate::database::postgres::session_lock::SessionLock;
use crate::database::{Database, DatabaseError, DatabaseLocation, Statement, values};
use crate::keys::{KeyName, NewKey, Permission};
use crate::ledger::append::tests::{row, with_outcome};
use crate::ledger::{Filter, SCHEMA};
use crate::secret::SecretDigest;
use crate::store::Store;
use crate::store::test_server::PostgresServer;
use crate::when::Range;

/// The modes of a proxy. A loss happens once.
const PASS: u8 = 0;
const REFUSE: u8 = 1;
const LOSE_REQUEST: u8 = 2;
const LOSE_ANSWER: u8 = 3;
/// COMMIT or its answer is lost.
const LOSE_COMMIT: u8 = 4;
const LOSE_COMMIT_ANSWER: u8 = 5;
/// Connections are accepted, and nothing more happens.
const HANG: u8 = 6;

/// A proxy between the engine and its server.
#[derive(Clone)]
struct FaultyProxy {
    address: SocketAddr,
    mode: Arc<AtomicU8>,
    accepted: Arc<AtomicUsize>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl FaultyProxy {
    fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proxy = Self {
            address: listener.local_addr().expect("its address"),
            mode: Arc::default(),
            accepted: Arc::default(),
            open: Arc::default(),
        };
        let (accepting, server) = (proxy.clone(), server.to_owned());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                accepting.accepted.fetch_add(1, Ordering::SeqCst);
                let mode = accepting.mode.load(Ordering::SeqCst);
                if mode == REFUSE {
                    continue;
                }
                if mode != HANG {
                    let server = TcpStream::connect(&server).expect("the server");
                    accepting.forward(&client, &server, LOSE_REQUEST);
                    accepting.forward(&server, &client, LOSE_ANSWER);
                }
                accepting.open().push(client);
            }
        });
        proxy
    }

    /// Copies what comes, until it has to be lost.
    fn forward(&self, from: &TcpStream, to: &TcpStream, loss: u8) {
        let (proxy, mut from, mut to) = (
            self.clone(),
            from.try_clone().expect("a handle"),
            to.try_clone().expect("a handle"),
        );
        thread::spawn(move || {
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                if buffer[..count].windows(6).any(|text| text == b"COMMIT") {
                    for (from, to) in [
                        (LOSE_COMMIT, LOSE_REQUEST),
                        (LOSE_COMMIT_ANSWER, LOSE_ANSWER),
                    ] {
                        let _ = proxy.mode.compare_exchange(
                            from,
                            to,
                            Ordering::SeqCst,
                            Ordering::SeqCst,
                        );
                    }
                }
                let lost = proxy
                    .mode
                    .compare_exchange(loss, PASS, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok();
                if lost || to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        });
    }

    fn open(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.open.lock().expect("no panic")
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
        if mode == REFUSE {
            self.open()
                .drain(..)
                .for_each(|client| drop(client.shutdown(Shutdown::Both)));
        }
    }
}

/// The URI of a new database, by way of as many proxies as there are hosts.
fn proxies(hosts: usize) -> (Vec<FaultyProxy>, DatabaseUri) {
    let uri = PostgresServer::shared().database();
    let server = uri
        .split_once('@')
        .and_then(|(_, rest)| rest.split_once('/'))
        .expect("a host")
        .0;
    let proxies: Vec<FaultyProxy> = (0..hosts).map(|_| FaultyProxy::start(server)).collect();
    let addresses: Vec<String> = proxies
        .iter()
        .map(|proxy| proxy.address.to_string())
        .collect();
    (
        proxies,
        DatabaseUri::parse(&uri.replace(server, &addresses.join(","))).expect("a good URI"),
    )
}

/// An engine with a table `t`.
fn engine(hosts: usize, connections: usize) -> (Vec<FaultyProxy>, Database) {
    let (proxies, uri) = proxies(hosts);
    let engine = Database::Postgres(
        Postgres::open(&uri, &SCHEMA, connections, Access::Create).expect("a new database"),
    );
    let table = "CREATE TABLE t (id BIGINT PRIMARY KEY, x BIGINT)";
    engine
        .transaction(|session| session.execute(table, &[]))
        .expect("a table");
    (proxies, engine)
}

/// Calls the functions that both engines share.
fn pool(database: &Database) -> &Arc<PgPool> {
    match database {
        Database::Sqlite(_) => panic!("it is PostgreSQL"),
        Database::Postgres(postgres) => &postgres.pool,
    }
}

impl Database {
    fn insert(&self, id: i64) -> Result<usize> {
        let statement = Statement::new(
            "INSERT INTO t SELECT $1, 0 WHERE $1 <> 13 ON CONFLICT (id) DO NOTHING",
            values![id],
        )
        .settled_by("SELECT 1 FROM t WHERE id = $1", values![id]);
        self.write(&[statement])
    }
}

fn count(engine: &Database) -> i64 {
    engine
        .read(|session| session.value("SELECT count(*) FROM t", &[]))
        .expect("a count")
}

#[test]
fn a_write_whose_answer_is_lost_is_settled() {
    let (proxies, engine) = engine(1, 4);
    for (id, loss) in [
        (1, LOSE_COMMIT_ANSWER),
        (2, LOSE_REQUEST),
        (3, LOSE_COMMIT_ANSWER),
        (4, LOSE_ANSWER),
        (5, LOSE_COMMIT),
        (6, PASS),
    ] {
        proxies[0].set(loss);
        assert_eq!(engine.insert(id).expect("it is settled"), 1, "{id}");
        assert_eq!(count(&engine), id, "once each");
    }
    proxies[0].set(LOSE_COMMIT_ANSWER);
    let update = Statement::new("UPDATE t SET x = 1 WHERE id = $1 AND x = 0", values![4_i64])
        .settled_by("SELECT 1 FROM t WHERE id = $1 AND x = 1", values![4_i64]);
    assert_eq!(
        engine.write(&[update]).expect("it is settled"),
        1,
        "the second attempt changed nothing"
    );
    proxies[0].set(LOSE_COMMIT_ANSWER);
    assert_eq!(
        engine.insert(13).expect("it is settled"),
        0,
        "it was refused, and not done"
    );
    assert_eq!(
        engine.insert(4).expect("a write"),
        0,
        "without a loss a duplicate is not settled"
    );
}

/// Every write of the store that is not the same when it is repeated.
#[test]
fn the_store_settles_its_writes() {
    let (proxies, uri) = proxies(1);
    let store =
        Store::open(&DatabaseLocation::Postgres(uri), Access::Create).expect("a new database");
    let losing = || proxies[0].set(LOSE_COMMIT_ANSWER);
    let (name, password) = (
        KeyName::parse("x").expect("a name"),
        PasswordHash {
            salt: vec![1],
            hash: vec![2],
            memory_kib: 8,
            passes: 1,
        },
    );
    let key = NewKey {
        name: &name,
        permissions: &[Permission::Completions],
        created: 1,
        expires: None,
        concurrent: None,
        budget: None,
    };
    let by = Actor::command("ana".into());
    losing();
    assert!(
        store
            .keys
            .add_as("key_1", "key_1", &key, &by)
            .expect("it is settled")
    );
    let losses = [LOSE_REQUEST, LOSE_ANSWER, LOSE_COMMIT, LOSE_COMMIT_ANSWER];
    for (number, loss) in (1..).zip(losses) {
        for (end, status) in [("a", 200), ("b", 400)] {
            proxies[0].set(loss);
            store
                .ledger
                .append(with_outcome(row(end, "key_1", number), status, Some(5)))
                .expect("it is settled");
            assert_eq!(
                proxies[0].mode.load(Ordering::SeqCst),
                PASS,
                "something was lost"
            );
        }
        proxies[0].set(loss);
        assert!(
            store
                .keys
                .find(&SecretDigest::of("key_1"), 1)
                .expect("it is repeated")
                .is_some()
        );
        proxies[0].set(PASS);
    }
    proxies[0].set(LOSE_ANSWER);
    assert!(
        store.ledger.append(row("a", "key_1", 1)).is_err(),
        "it is not taken for the row of that id"
    );
    credentials::set_password(&store, password.clone(), &by).expect("a password");
    losing();
    let tokens = [
        (SecretDigest::of("one"), TokenKind::Session, 9),
        (SecretDigest::of("other"), TokenKind::Browser, 9),
    ];
    assert!(credentials::sign_in(&store, tokens, 1, &password, &by).expect("it is settled"));
    losing();
    assert!(store.keys.revoke("key_1", 1, &by).expect("it is settled"));
    let mut actions = Vec::new();
    store
        .audit
        .list(0, |row| actions.push(row.action))
        .expect("the audit");
    actions.sort();
    assert_eq!(
        actions,
        ["key_created", "key_revoked", "password_set", "signed_in"],
        "once each"
    );
    proxies[0].set(LOSE_ANSWER);
    assert!(matches!(
        store.ledger.append(row("d", "key_1", 1)),
        Err(DatabaseError::KeyRevoked)
    ));
    assert_eq!(
        store
            .ledger
            .sums(Range::ALL, Filter::ALL)
            .expect("the figures")
            .requests,
        8,
        "once each"
    );
    assert_eq!(store.ledger.verify().expect("a walk").fault, None);
}

#[test]
fn an_unknown_outcome_is_settled_on_the_next_host() {
    let (proxies, engine) = engine(2, 4);
    assert_eq!(
        proxies[1].accepted.load(Ordering::SeqCst),
        0,
        "the first host is good"
    );
    proxies[0].set(LOSE_COMMIT_ANSWER);
    engine.insert(1).expect("it is settled");
    let attempts = proxies[0].accepted.load(Ordering::SeqCst);
    engine.insert(2).expect("a write");
    assert_eq!(
        proxies[0].accepted.load(Ordering::SeqCst),
        attempts,
        "the good host is tried first"
    );
    assert_eq!(count(&engine), 2);
    proxies[1].set(LOSE_ANSWER);
    let try_write = || engine.transaction(|session| session.execute(TRY_WRITE, &[]).map(drop));
    assert!(matches!(try_write(), Err(DatabaseError::Unknown(_))));
    try_write().expect("back on the first host");
    assert!(proxies[0].accepted.load(Ordering::SeqCst) > attempts);
}

#[test]
fn while_the_database_is_lost_look_ups_fail_at_once_and_writes_wait() {
    let (proxies, engine) = engine(1, 4);
    proxies[0].set(REFUSE);
    let look_up = || engine.look_up("SELECT 1", &[], |_| Ok(()));
    assert!(look_up().is_err());
    let attempts = proxies[0].accepted.load(Ordering::SeqCst);
    let began = Instant::now();
    for _ in 0..1000 {
        assert!(matches!(look_up(), Err(DatabaseError::Unavailable(_))));
        assert!(engine.read(|_| Ok(())).is_err() && engine.transaction(|_| Ok(())).is_err());
    }
    let probes = proxies[0].accepted.load(Ordering::SeqCst) - attempts;
    assert!(
        probes as u128 <= began.elapsed().as_millis() / 200 + 1,
        "{probes} attempts for 3000 calls"
    );
    thread::scope(|scope| {
        let waiting = scope.spawn(|| engine.insert(2));
        while proxies[0].accepted.load(Ordering::SeqCst) < attempts + probes + 2 {
            thread::yield_now();
        }
        assert!(!waiting.is_finished(), "it waits");
        proxies[0].set(PASS);
        waiting
            .join()
            .expect("no panic")
            .expect("the database is back");
    });
    engine.insert(1).expect("the database is back");
    assert_eq!(count(&engine), 2);
}

#[test]
fn a_start_tries_a_host_again_that_does_not_answer_and_no_other() {
    let (proxies, mut uri) = proxies(1);
    uri.connect_timeout = Duration::from_secs(1);
    for start in [
        |uri: &DatabaseUri| {
            Postgres::open(uri, &SCHEMA, 1, Access::Create)
                .map(drop)
                .map_err(|error| error.to_string())
        },
        |uri: &DatabaseUri| {
            SessionLock::take(uri, "name", "")
                .map(drop)
                .map_err(|error| error.to_string())
        },
    ] {
        let before = proxies[0].accepted.load(Ordering::SeqCst);
        proxies[0].set(HANG);
        thread::scope(|scope| {
            let started = scope.spawn(|| start(&uri));
            while proxies[0].accepted.load(Ordering::SeqCst) < before + 2 && !started.is_finished()
            {
                thread::sleep(Duration::from_millis(5));
            }
            proxies[0].set(PASS);
            started
                .join()
                .expect("no panic")
                .expect("it is found in the end");
        });
        proxies[0].set(REFUSE);
        let before = proxies[0].accepted.load(Ordering::SeqCst);
        start(&uri).expect_err("nobody answers");
        assert_eq!(proxies[0].accepted.load(Ordering::SeqCst), before + 1);
    }
}

#[test]
fn there_are_no_more_connections_than_allowed_and_one_is_for_rows() {
    let (_proxies, engine) = engine(1, 3);
    let get = |time| pool(&engine).get(Instant::now() + time, TransactionMode::Read);
    let held = [0, 1].map(|_| get(Duration::from_secs(30)).expect("a connection"));
    assert!(matches!(
        get(Duration::from_millis(50)),
        Err(DatabaseError::NoConnection)
    ));
    let deadline = Instant::now() + Duration::from_secs(30);
    let append = || pool(&engine).get(deadline, TransactionMode::Append(deadline));
    drop(append().expect("the connection that look-ups can't take"));
    assert!(
        matches!(
            get(Duration::from_millis(50)),
            Err(DatabaseError::NoConnection)
        ),
        "it is idle, and kept"
    );
    append().expect("it is still there");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| count(&engine));
        drop(held);
        assert_eq!(waiting.join().expect("no panic"), 0);
    });
    // A transaction that failed gives its connection back too.
    for _ in 0..3 {
        assert!(
            engine
                .transaction(|session| session.execute("INSERT INTO t VALUES (1), (1)", &[]))
                .is_err()
        );
        assert!(
            engine
                .read(|session| session.execute("INSERT INTO t VALUES (1)", &[]))
                .is_err(),
            "it only reads"
        );
    }
    let work = |_: &Session| -> Result<()> { panic!("on purpose") };
    let panicked = thread::scope(|scope| scope.spawn(|| engine.transaction(work)).join().is_err());
    assert!(panicked);
    assert_eq!(count(&engine), 0);
}

#[test]
fn a_server_with_no_room_for_another_connection_is_not_lost() {
    let (_proxies, engine) = engine(1, 4);
    let name: String = engine
        .read(|session| session.value("SELECT CAST(current_database() AS TEXT)", &[]))
        .expect("its name");
    PostgresServer::shared().psql(&format!("ALTER DATABASE {name} CONNECTION LIMIT 2"));
    let get = |time| pool(&engine).get(Instant::now() + time, TransactionMode::Read);
    let held = [0, 1].map(|_| get(Duration::from_secs(30)).expect("a connection"));
    let third = get(Duration::from_millis(500)).err();
    assert!(
        matches!(third, Some(DatabaseError::NoConnection)),
        "{third:?}"
    );
    thread::scope(|scope| {
        let waiting = scope.spawn(|| count(&engine));
        drop(held);
        assert_eq!(
            waiting.join().expect("no panic"),
            0,
            "it waits for those that there are"
        );
    });
}

#[test]
fn transactions_that_meet_wait_for_each_other() {
    let (_proxies, engine) = engine(1, 4);
    engine.insert(1).expect("a row");
    let add = |session: &Session| {
        let x: i64 = session.value("SELECT x FROM t WHERE id = 1 FOR UPDATE", &[])?;
        session.execute("UPDATE t SET x = $1 WHERE id = 1", &values![x + 1])
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..10).for_each(|_| assert_eq!(engine.transaction(add).expect("its turn"), 1))
            });
        }
    });
    let sum: i64 = engine
        .read(|session| session.value("SELECT x FROM t WHERE id = 1", &[]))
        .expect("a sum");
    assert_eq!(sum, 40, "none was lost");
}

#[test]
fn a_read_sees_one_state_and_a_query_within_a_query_is_an_error() {
    let (_proxies, engine) = engine(1, 4);
    engine
        .read(|session| {
            let count = || session.value::<i64>("SELECT count(*) FROM t", &[]);
            assert_eq!(count()?, 0);
            engine.insert(1)?;
            assert_eq!(count()?, 0, "as at the beginning");
            let nested = session.query("SELECT 1", &[], &mut |_| count().map(drop));
            assert!(matches!(nested, Err(DatabaseError::Other(_))), "{nested:?}");
            Ok(())
        })
        .expect("a read");
    assert_eq!(count(&engine), 1);
}
