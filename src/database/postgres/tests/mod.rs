//! The engine against a real server, with connections that break at the worst moment.

mod round_trips;

use std::cell::Cell;
use std::io::{Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use super::*;
use crate::database::{Statement, WriteConnection};
use crate::store::test_server::PostgresServer;

/// The modes of a proxy. A loss happens once.
pub const PASS: u8 = 0;
pub const REFUSE: u8 = 1;
pub const LOSE_REQUEST: u8 = 2;
pub const LOSE_ANSWER: u8 = 3;
/// COMMIT or its answer is lost.
pub const LOSE_COMMIT: u8 = 4;
pub const LOSE_COMMIT_ANSWER: u8 = 5;
/// Connections are accepted, and nothing more happens.
const HANG: u8 = 6;

const MINUTE: Duration = Duration::from_secs(60);

const SCHEMA: Schema = Schema {
    tables: "CREATE TABLE t (id BIGINT PRIMARY KEY, x BIGINT)",
    version: 11,
    steps: &[],
};

const PID: &str = "SELECT CAST(pg_backend_pid() AS BIGINT)";

/// A proxy between the engine and its server.
#[derive(Clone)]
pub struct FaultyProxy {
    address: SocketAddr,
    pub mode: Arc<AtomicU8>,
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
                // Every transaction begins with READ COMMITTED.
                if buffer[..count].windows(7).any(|text| text == b"COMMIT\0") {
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

    /// `REFUSE` and `HANG` also end the connections that there are.
    pub fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
        if matches!(mode, REFUSE | HANG) {
            self.open()
                .drain(..)
                .for_each(|client| drop(client.shutdown(Shutdown::Both)));
        }
    }

    /// The number of connections that it has accepted.
    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// The URI of a new database, by way of as many proxies as there are hosts.
pub fn proxies(hosts: usize) -> (Vec<FaultyProxy>, DatabaseUri) {
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

/// A database with a table `t`.
struct Opened {
    proxies: Vec<FaultyProxy>,
    postgres: Arc<Postgres>,
    writer: PgWriter,
}

impl Opened {
    fn new(hosts: usize) -> Self {
        let (proxies, uri) = proxies(hosts);
        let opened = Postgres::open(&uri, &SCHEMA, Access::Create).expect("a new database");
        let (postgres, writer, is_new) = opened;
        assert!(is_new);
        Self {
            proxies,
            postgres,
            writer,
        }
    }

    /// Writes in one attempt.
    fn write(&mut self, statement: &'static str) -> Result<()> {
        let session = self.writer.begin(Instant::now() + MINUTE)?;
        session.commit(&[Statement::new(statement, [])])
    }

    /// Reads a number in one attempt.
    fn value(&self, statement: &str) -> Result<i64> {
        read(&self.postgres, MINUTE, statement)
    }

    /// Writes until a deadline, as the service does.
    fn transaction<T>(
        &mut self,
        deadline: Instant,
        work: impl Fn(&Session) -> Result<T>,
    ) -> Result<T> {
        let connection = PgWriter {
            postgres: Arc::clone(&self.postgres),
            connection: self.writer.connection.take(),
        };
        let mut connection = WriteConnection::Postgres(connection);
        let done = connection.transaction(deadline, None, work);
        if let WriteConnection::Postgres(writer) = connection {
            self.writer = writer;
        }
        done
    }

    fn pid_of_the_writer(&mut self) -> i64 {
        let session = self.writer.begin(Instant::now() + MINUTE).expect("a begin");
        let pid = Session::Postgres(&session).value(PID, &[]);
        session.commit(&[]).expect("a commit");
        pid.expect("its pid")
    }
}

/// Reads a number with one statement by itself.
fn read(postgres: &Postgres, time: Duration, statement: &str) -> Result<i64> {
    postgres.read(false, Instant::now() + time, |session| {
        session.value(statement, &[])
    })
}

fn sleep(session: &Session, seconds: f64) -> Result<i64> {
    session.value(
        &format!("SELECT CAST(1 AS BIGINT) FROM pg_sleep({seconds})"),
        &[],
    )
}

fn kind<T>(result: Result<T>) -> Option<ProblemKind> {
    result.err().map(|problem| problem.kind)
}

/// A read that took 3 s ended its connection and all others, and the next host was asked, while the
/// server went on with it.
#[test]
fn a_slow_read_touches_no_connection_but_its_own() {
    let mut opened = Opened::new(2);
    let writer = opened.pid_of_the_writer();
    let (began, postgres) = (Instant::now(), Arc::clone(&opened.postgres));
    thread::scope(|scope| {
        let slow = scope.spawn(|| {
            postgres.read(false, Instant::now() + MINUTE, |session| {
                let pid = session.value::<i64>(PID, &[])?;
                assert_eq!(kind(sleep(session, 60.0)), Some(ProblemKind::Busy));
                Ok((pid, session.value::<i64>(PID, &[])?))
            })
        });
        while !slow.is_finished() {
            opened.value(PID).expect("a look-up beside it");
            assert_eq!(opened.pid_of_the_writer(), writer);
        }
        let (pid, after) = slow.join().expect("no panic").expect("a read");
        assert_eq!(pid, after, "its connection can be used again");
    });
    assert!(began.elapsed() >= STATEMENT_TIMEOUT && began.elapsed() < MINUTE);
    let accepted: Vec<usize> = opened.proxies.iter().map(FaultyProxy::accepted).collect();
    assert_eq!(accepted, [3, 0], "two that read, and one that writes");
}

#[test]
fn a_report_has_its_own_time() {
    let opened = Opened::new(1);
    let report = |time, work: &dyn Fn(&Session) -> Result<i64>| {
        opened.postgres.read(true, Instant::now() + time, work)
    };
    report(MINUTE, &|session| sleep(session, 3.2)).expect("it may take a minute");
    let timeout =
        "SELECT CAST(setting AS BIGINT) FROM pg_settings WHERE name = 'statement_timeout'";
    assert_eq!(opened.value(timeout).expect("a look"), 3000);
    // One with little time left fails alone.
    let pid = opened.value(PID).expect("its pid");
    let late = report(Duration::from_millis(300), &|session| {
        assert_eq!(kind(sleep(session, 60.0)), Some(ProblemKind::Busy));
        thread::sleep(Duration::from_millis(300));
        session.value(PID, &[])
    });
    let late = late.expect_err("no statement begins after the deadline");
    assert!(late.text.contains("took too long"), "{late}");
    assert_eq!(opened.value(PID).expect("its pid"), pid, "it is kept");
}

/// A gateway stayed on a primary that was replaced, where its own commit, which never ended, kept
/// the lock of its head.
#[test]
fn a_write_that_waits_for_a_lock_tries_the_next_host() {
    let mut opened = Opened::new(2);
    opened.pid_of_the_writer();
    assert_eq!(opened.proxies[1].accepted(), 0, "the first host is good");
    let mut other = PgWriter {
        postgres: Arc::clone(&opened.postgres),
        connection: None,
    };
    thread::scope(|scope| {
        let (locked, is_locked) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let session = other.begin(Instant::now() + MINUTE).expect("a begin");
            Session::Postgres(&session)
                .execute("LOCK TABLE t IN SHARE MODE", &[])
                .expect("a lock");
            locked.send(()).expect("it listens");
            thread::sleep(Duration::from_secs(4));
        });
        is_locked.recv().expect("a lock");
        let attempts = Cell::new(0);
        let row = |session: &Session| {
            attempts.set(attempts.get() + 1);
            session.execute("INSERT INTO t VALUES (1, 1)", &[])
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        let written = opened.transaction(deadline, row);
        assert_eq!(written.expect("it is done in its time"), 1);
        assert_eq!(attempts.get(), 2);
    });
    assert_eq!(opened.value("SELECT count(*) FROM t").expect("a count"), 1);
    assert!(opened.proxies[1].accepted() > 0, "the second attempt");
}

#[test]
fn a_write_with_little_time_left_does_not_wait_longer() {
    let mut opened = Opened::new(1);
    let pid = opened.pid_of_the_writer();
    let deadline = Instant::now() + Duration::from_millis(300);
    let session = opened.writer.begin(deadline).expect("a begin");
    let slow = sleep(&Session::Postgres(&session), 60.0);
    assert_eq!(kind(slow), Some(ProblemKind::Busy));
    assert!(Instant::now() < deadline + STATEMENT_TIMEOUT);
    drop(session);
    assert_eq!(opened.pid_of_the_writer(), pid);
}

#[test]
fn an_unknown_outcome_drops_every_connection_and_begins_with_the_next_host() {
    let mut opened = Opened::new(2);
    opened
        .write("INSERT INTO t VALUES (0, 1)")
        .expect("a write");
    let pid = opened.value(PID).expect("its pid");
    assert_eq!(opened.proxies[1].accepted(), 0, "the first host is good");
    opened.proxies[0].set(LOSE_COMMIT_ANSWER);
    let lost = opened.write("INSERT INTO t VALUES (1, 1)");
    assert_eq!(kind(lost), Some(ProblemKind::Unknown));
    let before = opened.proxies[0].accepted();
    assert_ne!(opened.value(PID).expect("another host"), pid);
    assert_eq!(opened.value("SELECT count(*) FROM t").expect("a count"), 2);
    opened
        .write("INSERT INTO t VALUES (2, 1)")
        .expect("a write");
    assert_eq!(opened.proxies[0].accepted(), before);
    // A read that was lost does the same.
    let writer = opened.pid_of_the_writer();
    opened.proxies[1].set(LOSE_ANSWER);
    assert_eq!(kind(opened.value(PID)), Some(ProblemKind::Unknown));
    assert_ne!(opened.pid_of_the_writer(), writer);
    assert!(opened.proxies[0].accepted() > before, "back on the first");
}

#[test]
fn two_hosts_that_answer_nothing_leave_time_for_the_third() {
    let mut opened = Opened::new(3);
    opened
        .write("INSERT INTO t VALUES (0, 1)")
        .expect("a write");
    opened.proxies[..2].iter().for_each(|proxy| proxy.set(HANG));
    let began = Instant::now();
    opened
        .write("INSERT INTO t VALUES (1, 1)")
        .expect("the third host");
    assert!(began.elapsed() < CONNECTION_TIMEOUT + MINUTE / 10);
    assert_eq!(opened.value("SELECT count(*) FROM t").expect("a count"), 2);
    opened.proxies[2].set(HANG);
    opened.proxies[1].set(PASS);
    let time = Duration::from_millis(1500);
    let found = read(&opened.postgres, time, "SELECT count(*) FROM t");
    assert_eq!(found.expect("the second host"), 2);
    opened.proxies[1].set(HANG);
    let uri = &opened.postgres.uri;
    opened.proxies[2].set(PASS);
    Postgres::open(uri, &SCHEMA, Access::Existing).expect("a start finds the third host");
}

#[test]
fn a_host_that_refuses_is_said_at_once_to_each_caller() {
    let mut opened = Opened::new(1);
    opened
        .write("INSERT INTO t VALUES (0, 1)")
        .expect("a write");
    opened.proxies[0].set(REFUSE);
    let began = Instant::now();
    for _ in 0..100 {
        assert_eq!(kind(opened.value(PID)), Some(ProblemKind::Unavailable));
        let written = opened.write("INSERT INTO t VALUES (1, 1)");
        assert_eq!(kind(written), Some(ProblemKind::Unavailable));
    }
    assert!(began.elapsed() < MINUTE);
    // One that may try again does so every 200 ms.
    let before = opened.proxies[0].accepted();
    let deadline = Instant::now() + 5 * CONNECT_PAUSE;
    let refused = opened.transaction(deadline, |session| session.value::<i64>(PID, &[]));
    assert_eq!(kind(refused), Some(ProblemKind::Unavailable));
    assert!((1..=5).contains(&(opened.proxies[0].accepted() - before)));
    opened.proxies[0].set(PASS);
    opened
        .write("INSERT INTO t VALUES (1, 1)")
        .expect("it is back");
    assert_eq!(opened.value("SELECT count(*) FROM t").expect("a count"), 2);
}

#[test]
fn there_are_no_more_connections_than_allowed() {
    let opened = Opened::new(1);
    let get = |time| opened.postgres.reader(Instant::now() + time);
    let held = [(); MAX_READERS].map(|()| get(MINUTE).expect("a connection"));
    let none = get(Duration::from_millis(50));
    assert_eq!(kind(none), Some(ProblemKind::Busy));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| opened.value("SELECT count(*) FROM t"));
        drop(held);
        assert_eq!(waiting.join().expect("no panic").expect("its turn"), 0);
    });
    // A read that failed gives its connection back too.
    for _ in 0..=MAX_READERS {
        opened
            .value("SELECT no_column FROM t")
            .expect_err("no column");
    }
    assert_eq!(opened.proxies[0].accepted(), MAX_READERS);
}

#[test]
fn a_server_with_no_room_for_another_connection_is_not_lost() {
    let opened = Opened::new(1);
    let name = &opened.postgres.uri.database;
    PostgresServer::shared().psql(&format!("ALTER DATABASE {name} CONNECTION LIMIT 2"));
    let get = |time| opened.postgres.reader(Instant::now() + time);
    let held = [0, 1].map(|_| get(MINUTE).expect("a connection"));
    let third = get(Duration::from_millis(500));
    assert_eq!(kind(third), Some(ProblemKind::Busy));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| opened.value("SELECT count(*) FROM t"));
        thread::sleep(Duration::from_millis(100));
        drop(held);
        let found = waiting.join().expect("no panic");
        assert_eq!(found.expect("one of those that there are"), 0);
    });
}

#[test]
fn a_read_sees_one_state_and_a_query_within_a_query_is_an_error() {
    let mut opened = Opened::new(1);
    let postgres = Arc::clone(&opened.postgres);
    let read = postgres.read(true, Instant::now() + MINUTE, |session| {
        let count = || session.value::<i64>("SELECT count(*) FROM t", &[]);
        assert_eq!(count()?, 0);
        opened.write("INSERT INTO t VALUES (1, 1)")?;
        assert_eq!(count()?, 0, "as at the beginning");
        let nested = session.query("SELECT 1", &[], &mut |_| count().map(drop));
        assert_eq!(kind(nested), Some(ProblemKind::Other));
        Ok(())
    });
    read.expect("a snapshot");
    assert_eq!(opened.value("SELECT count(*) FROM t").expect("a count"), 1);
}

fn open(uri: &str, access: Access) -> Result<bool> {
    let uri = DatabaseUri::parse(uri).expect("a good URI");
    Postgres::open(&uri, &SCHEMA, access).map(|(_, _, is_new)| is_new)
}

#[test]
fn the_tables_are_created_once_however_many_start_at_the_same_time() {
    let uri = PostgresServer::shared().database();
    for access in [Access::Existing, Access::Read] {
        assert_eq!(kind(open(&uri, access)), Some(ProblemKind::Missing));
    }
    let created = thread::scope(|scope| {
        let start = || open(&uri, Access::Serve).expect("a database");
        let all: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
        all.into_iter()
            .map(|one| one.join().expect("no panic"))
            .filter(|is_new| *is_new)
            .count()
    });
    assert_eq!(created, 1);
    assert!(!open(&uri, Access::Existing).expect("it is there"));
}

#[test]
fn another_version_and_tables_of_another_program_are_left_alone() {
    let uri = PostgresServer::shared().database();
    open(&uri, Access::Create).expect("a new database");
    let run = |uri: &str, statement: &str| {
        let uri = DatabaseUri::parse(uri).expect("a good URI");
        let postgres = Postgres::new(&uri).expect("an engine");
        let change = |session: &Session| session.run_script(statement);
        postgres.change_schema(change).expect("a good statement");
    };
    for (version, hint) in [(10, "no release had it"), (12, "a later one")] {
        let change = format!("UPDATE schema_version SET version = {version}");
        run(&uri, &change);
        let problem = open(&uri, Access::Serve).expect_err("another version");
        assert_eq!(problem.kind, ProblemKind::Version);
        assert!(problem.text.contains(hint), "{problem}");
    }
    let uri = PostgresServer::shared().database();
    run(&uri, "CREATE TABLE mine (x BIGINT)");
    let problem = open(&uri, Access::Create).expect_err("it is not ours");
    assert!(problem.text.contains("another program"), "{problem}");
}
