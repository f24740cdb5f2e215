//! TLS on the listener: certificates, sessions, and handshakes that delay no one else.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use adriaticum::listener::{Acceptor, Certificate, Limits};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::time_provider::TimeProvider;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion, version,
};

use crate::limits::{Running, get, serve_with};
use crate::metrics::{CONSOLE, metrics_key};
use crate::support::{
    Client, Folder, PATIENCE, Runtime, Script, Server, chat, completion, raw_request, request,
    until,
};

pub type Secured = Client<StreamOwned<ClientConnection, TcpStream>>;

/// Writes a new certificate and its key to where the server looks for them.
pub fn certify(folder: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(["api.test".to_owned()]).expect("a certificate");
    fs::write(folder.join("cert.pem"), made.cert.pem()).expect("a file");
    fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).expect("a file");
    made.cert.der().clone()
}

/// Puts a pipe in the place of a file. Opening it would wait for a writer.
fn make_pipe(path: &Path) {
    let _ = fs::remove_file(path);
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
}

/// A server that speaks TLS, not started yet, and its certificate.
fn secured(runtime: &Runtime) -> (Server, CertificateDer<'static>) {
    let server = Server::new(Some(runtime));
    let folder = server.folder.path("");
    let certificate = certify(&folder);
    let server = server
        .set("ADRIATICUM_TLS_CERT", folder.join("cert.pem").display())
        .set("ADRIATICUM_TLS_KEY", folder.join("key.pem").display());
    (server, certificate)
}

pub fn client_config(
    trusted: &CertificateDer<'static>,
    versions: &[&'static SupportedProtocolVersion],
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("a good certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .expect("good versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// The first bytes of a handshake.
pub fn client_hello() -> Vec<u8> {
    let config = client_config(
        &rcgen::generate_simple_self_signed([])
            .expect("a certificate")
            .cert
            .der()
            .clone(),
        rustls::ALL_VERSIONS,
    );
    let name = ServerName::try_from("api.test").expect("a good name");
    let mut hello = Vec::new();
    ClientConnection::new(config, name)
        .expect("a session")
        .write_tls(&mut hello)
        .expect("a Vec takes it");
    hello
}

pub fn shake_hands(
    address: impl ToSocketAddrs,
    config: &Arc<ClientConfig>,
) -> std::io::Result<Secured> {
    let name = ServerName::try_from("api.test").expect("a good name");
    let mut session = ClientConnection::new(Arc::clone(config), name).expect("a session");
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    while session.is_handshaking() {
        session.complete_io(&mut stream)?;
    }
    Ok(Client::of(StreamOwned::new(session, stream)))
}

/// A connection that trusts this certificate and no other.
#[track_caller]
fn connect(server: &Server, trusted: &CertificateDer<'static>) -> Secured {
    shake_hands(
        &server.address,
        &client_config(trusted, rustls::ALL_VERSIONS),
    )
    .expect("a handshake")
}

#[test]
fn both_versions_kept_connections_pipelining_and_close_notify() {
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let server = server.start();
    server.has_logged("listening on https://");
    let key = server.key();
    for versions in [[&version::TLS12], [&version::TLS13]] {
        let config = client_config(&certificate, &versions);
        let mut client = shake_hands(&server.address, &config).expect("a handshake");
        assert_eq!(
            client.stream.conn.protocol_version(),
            Some(versions[0].version)
        );
        assert_eq!(client.stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
        for _ in 0..3 {
            client.ask(request(&key, &chat("x"))).is_completion();
        }
        client.send(request(&key, &chat("x")).repeat(3));
        for _ in 0..3 {
            client.reply().is_completion();
        }
        client
            .ask(raw_request(
                &key,
                "Connection: close\r\n",
                &chat("x").to_string(),
            ))
            .is_completion();
        // Without a close_notify at the end, the next read would be an error.
        assert!(client.ends(), "the end is received");
        let mut again = shake_hands(&server.address, &config).expect("a handshake");
        assert_eq!(
            again.stream.conn.handshake_kind(),
            Some(rustls::HandshakeKind::Resumed)
        );
        again.ask(request(&key, &chat("x"))).is_completion();
    }
}

/// The end of the session alone is none: a client may have no more to send. That of the connection is.
#[test]
fn a_client_has_gone_when_its_connection_ends() {
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let server = server.start();
    let key = server.key();
    let gate = runtime.hold("held");
    let mut client = connect(&server, &certificate);
    client.send(request(&key, &chat("x")));
    until("it runs", || runtime.count() == 1);
    client.stream.conn.send_close_notify();
    client
        .stream
        .flush()
        .expect("the end of the session is sent");
    // The listener has read it by the time that a later connection is answered.
    let mut later = connect(&server, &certificate);
    later.ask(request(&key, &chat("x"))).is_completion();
    gate.store(true, Ordering::Release);
    assert_eq!(client.reply().is_completion(), "held");
    runtime.next(Script::Silent);
    later.send(request(&key, &chat("x")));
    until("it runs", || runtime.count() == 3);
    drop(later);
    until("it is cancelled", || {
        runtime.ended.load(Ordering::Acquire) == 1
    });
}

#[test]
fn large_bodies_and_large_answers() {
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let server = server.start();
    let key = server.key();
    let mut client = connect(&server, &certificate);
    for length in [1, 16_384, 16_385, 100_000] {
        let text = "z".repeat(length);
        runtime.next(Script::Answer(200, completion(&text)));
        // As large as a body may be: white space fills it up.
        let mut body = chat("x").to_string();
        body += &" ".repeat(262_144 - body.len());
        client.send(raw_request(&key, "", &body));
        assert_eq!(client.reply().is_completion(), text);
    }
    let large = "y".repeat(1_000_000);
    runtime.next(Script::Answer(200, completion(&large)));
    client.send(request(&key, &chat("x")));
    assert_eq!(client.reply().is_completion(), large);
    // Refused from its head alone, while the body still comes.
    client
        .ask(raw_request(&key, "", &" ".repeat(2_000_000)))
        .is_error(413, "payload_too_large");
}

#[test]
fn a_reload_shows_another_certificate_and_drops_no_connection() {
    let runtime = Runtime::start();
    let (server, old) = secured(&runtime);
    let server = server.start();
    let key = server.key();
    let folder = server.folder.path("");
    let mut kept = connect(&server, &old);
    kept.ask(request(&key, &chat("x"))).is_completion();

    fs::write(folder.join("key.pem"), "nonsense").expect("a file");
    server.signal(Signal::HUP);
    until("it is received", || {
        server.log().contains("not reloaded: tls.key = ")
    });
    connect(&server, &old).send("the old one is still in use");

    make_pipe(&folder.join("key.pem"));
    server.signal(Signal::HUP);
    until("it is received", || {
        server.log().contains("it is not a regular file")
    });
    connect(&server, &old).send("the old one is still in use");
    fs::remove_file(folder.join("key.pem")).expect("it should go");

    let new = certify(&folder);
    server.signal(Signal::HUP);
    let applied = "configuration reloaded: certificate (expires at 4096-01-01";
    until("it is taken", || server.log().contains(applied));
    let mut client = connect(&server, &new);
    client.ask(request(&key, &chat("x"))).is_completion();
    assert!(shake_hands(&server.address, &client_config(&old, rustls::ALL_VERSIONS)).is_err());
    kept.ask(request(&key, &chat("x"))).is_completion();
}

/// A client's clock at which a certificate that has expired since is valid.
#[derive(Debug)]
struct Year2018;

impl TimeProvider for Year2018 {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(
            1_530_000_000,
        )))
    }
}

/// The drill: an operator forgets to renew. The service starts, says so, and a reload of the same certificate does the same.
#[test]
fn an_expired_certificate_is_a_warning_at_a_start_and_at_a_reload() {
    let runtime = Runtime::start();
    let (server, _) = secured(&runtime);
    let folder = server.folder.path("");
    let certify_until = |year: i32| {
        let mut params = rcgen::CertificateParams::new(["api.test".to_owned()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = rcgen::KeyPair::generate().expect("a key");
        let made = params.self_signed(&key).expect("a certificate");
        fs::write(folder.join("cert.pem"), made.pem()).expect("a file");
        fs::write(folder.join("key.pem"), key.serialize_pem()).expect("a file");
        made.der().clone()
    };
    let expired = certify_until(2020);
    let server = server.start();
    let warning = "[ERROR] tls: the certificate expired at 2020-01-01 00:00 UTC. Renew it, then reload the service";
    let warnings = || server.log().matches(warning).count();
    until("it is said at the start", || warnings() == 1);
    server.signal(Signal::HUP);
    until("it is said at a reload", || warnings() == 2);
    let watcher = metrics_key(&server);
    let connect_in_2018 = |certificate: &CertificateDer<'static>| {
        let mut config = (*client_config(certificate, rustls::ALL_VERSIONS)).clone();
        config.time_provider = Arc::new(Year2018);
        shake_hands(&server.address, &Arc::new(config)).expect("a handshake")
    };
    let scrape = |certificate: &CertificateDer<'static>| {
        let mut client = connect_in_2018(certificate);
        client.send(format!(
            "GET /metrics HTTP/1.1\r\nHost: {CONSOLE}\r\nAuthorization: Bearer {watcher}\r\n\r\n"
        ));
        let text = String::from_utf8(client.reply().body).expect("text");
        let mut lines = text.lines();
        let value = lines.find_map(|line| {
            line.strip_prefix("adriaticum_tls_certificate_expiry_timestamp_seconds ")
        });
        value.expect("the metric").to_owned()
    };
    assert_eq!(scrape(&expired), "1577836800");
    let mut client = connect_in_2018(&expired);
    let reply = client.ask(format!("GET /readyz HTTP/1.1\r\nHost: {CONSOLE}\r\n\r\n"));
    assert_eq!(reply.status, 200);
    assert_eq!(reply.body, b"degraded: tls; the log says why\n");
    certify_until(2019);
    server.signal(Signal::HUP);
    until("an expired one is accepted too", || {
        server
            .log()
            .contains("reloaded: certificate (expires at 2019-01-01")
    });
    let output = server.run(&["check"]);
    assert_eq!(output.status.code(), Some(1));
    let findings = String::from_utf8(output.stdout).expect("text");
    assert!(
        findings.contains("the certificate expired at 2019-01-01"),
        "{findings}"
    );
    let renewed = certify(&folder);
    server.signal(Signal::HUP);
    until("a renewed one is used", || {
        server.log().contains("certificate (expires at 4096-01-01")
    });
    assert_eq!(scrape(&renewed), "67090118400");
    assert_eq!(warnings(), 2);
}

/// Bytes that are not a handshake, or only half of one, cost a buffer for a while and nothing else.
#[test]
fn silence_slowness_and_garbage_cost_no_worker() {
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let server = server.set("ADRIATICUM_WORKERS", 1).start();
    let key = server.key();
    let mut first = connect(&server, &certificate);
    first.ask(request(&key, &chat("x"))).is_completion();
    let (threads, memory) = (server.threads(), server.status("VmRSS"));

    let hello = client_hello();
    let open = || TcpStream::connect(&server.address).expect("a connection");
    let silent: Vec<TcpStream> = (0..200).map(|_| open()).collect();
    let halves: Vec<TcpStream> = (0..200)
        .map(|index| {
            let mut stream = open();
            stream
                .write_all(&hello[..1 + index % (hello.len() - 1)])
                .expect("it is taken");
            stream
        })
        .collect();
    // A whole hello, and never an answer to what the server says.
    let mute: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = open();
            stream.write_all(&hello).expect("it is taken");
            stream
        })
        .collect();
    let mut client = connect(&server, &certificate);
    for _ in 0..20 {
        client.ask(request(&key, &chat("x"))).is_completion();
    }
    assert_eq!(server.threads(), threads);
    let grown = server.status("VmRSS").saturating_sub(memory);
    assert!(grown < 600 * 24, "600 connections took {grown} KiB");
    drop((silent, halves, mute));

    for garbage in [
        b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n".to_vec(),
        vec![0; 70_000],
        vec![0xff; 70_000],
        // A record and a message in it that say to be larger than they may.
        [&[22, 3, 1, 0xff, 0xff][..], &[1; 70_000]].concat(),
        [&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[0; 70_000]].concat(),
        // A hello, and then nonsense.
        [&hello[..], &[23, 3, 3, 0, 9], &[7; 9]].concat(),
        hello.iter().map(|byte| byte ^ 0x11).collect(),
    ] {
        let mut stream = open();
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a time-out can be set");
        let _ = stream.write_all(&garbage);
        let _ = stream.shutdown(Shutdown::Write);
        let mut received = Vec::new();
        // It closes, with or without an alert; what it did not read may make that a reset.
        let _ = stream.read_to_end(&mut received);
        assert!(
            !received.starts_with(b"HTTP"),
            "nothing is said in the clear"
        );
        client.ask(request(&key, &chat("x"))).is_completion();
    }
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

/// What a large body has needed is not kept for the next.
#[test]
fn an_idle_session_holds_little() {
    const COUNT: u64 = 200;
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let server = server.start();
    // A key that does not exist: its form is good, so the body is read.
    let large = raw_request(&format!("adr_{:048}", 0), "", &" ".repeat(200_000));
    let ask = || {
        let mut client = connect(&server, &certificate);
        client.ask(&large).is_error(401, "invalid_api_key");
        client
    };
    drop(ask());
    let memory = server.status("VmRSS");
    let idle: Vec<Secured> = (0..COUNT).map(|_| ask()).collect();
    let grown = server.status("VmRSS").saturating_sub(memory);
    assert!(grown < COUNT * 24, "{COUNT} idle sessions hold {grown} KiB");
    drop(idle);
}

/// A connection whose handshake ended after the signal was kept for a minute, as an idle one is.
#[test]
fn a_handshake_that_ends_after_the_signal_does_not_delay_a_stop() {
    let runtime = Runtime::start();
    let (server, certificate) = secured(&runtime);
    let mut server = server.start();
    let name = ServerName::try_from("api.test").expect("a good name");
    let config = client_config(&certificate, rustls::ALL_VERSIONS);
    let mut session = ClientConnection::new(config, name).expect("a session");
    let mut stream = TcpStream::connect(&server.address).expect("a connection");
    session.write_tls(&mut stream).expect("it is taken");
    stream
        .peek(&mut [0])
        .expect("the server's part of the handshake");
    let began = Instant::now();
    server.signal(Signal::TERM);
    until("no connection is accepted", || {
        TcpStream::connect(&server.address).is_err()
    });
    // It fails if the machine is so slow that the time for a stop is over.
    while session.is_handshaking() && session.complete_io(&mut stream).is_ok() {}
    assert!(server.wait().success());
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
}

/// A listener that speaks TLS, and how to connect to it.
pub fn serve_tls(set: impl FnOnce(&mut Limits)) -> (Running, impl Fn() -> Secured) {
    let folder = Folder::new();
    let trusted = certify(&folder.path(""));
    let certificate = Certificate::read(&folder.path("cert.pem"), &folder.path("key.pem"))
        .expect("a certificate");
    let acceptor = Acceptor::new(certificate).expect("an acceptor");
    let running = serve_with(set, |listener| listener.acceptor = Some(Arc::new(acceptor)));
    let (address, config) = (
        running.address,
        client_config(&trusted, rustls::ALL_VERSIONS),
    );
    (running, move || {
        shake_hands(address, &config).expect("a handshake")
    })
}

/// Three TLS connections: one that has sent this much, one that is idle, and one whose refusal holds the loop.
pub fn hold_the_loop(running: &Running, connect: impl Fn() -> Secured, sent: &str) -> [Secured; 3] {
    let mut growing = connect();
    growing.send(sent);
    let (idle, mut broken) = (connect(), connect());
    running.hold_loop(&mut broken);
    [growing, idle, broken]
}

/// A handshake with an RSA key of 4,096 bits costs milliseconds.
#[test]
fn established_sessions_come_before_handshakes() {
    let (running, connect) = serve_tls(|_| {});
    let strangers: Vec<TcpStream> = (0..50).map(|_| running.connect().stream).collect();
    let [mut established, _idle, mut broken] = hold_the_loop(&running, connect, "");
    assert_eq!(running.state.snapshot().accepted, 53);
    for stranger in &strangers {
        (&*stranger)
            .write_all(&client_hello())
            .expect("the system takes it");
    }
    established.send(get("/head"));
    running.echo.hold_head.store(true, Ordering::Release);
    running.release_loop();
    until("it has its turn", || {
        running.echo.is_head_held.load(Ordering::Acquire)
    });
    for stranger in &strangers {
        stranger
            .set_nonblocking(true)
            .expect("an option of the socket");
        assert!(
            stranger.peek(&mut [0]).is_err(),
            "a handshake was answered first"
        );
        stranger
            .set_nonblocking(false)
            .expect("an option of the socket");
    }
    running.echo.hold_head.store(false, Ordering::Release);
    assert_eq!(
        (established.reply().status, broken.reply().status),
        (404, 400)
    );
    for stranger in &strangers {
        assert_eq!(
            stranger
                .peek(&mut [0])
                .expect("the server's part of the handshake"),
            1
        );
    }
}

/// Many handshakes of some addresses delay another address by a step of each.
#[test]
fn the_handshakes_of_addresses_take_turns() {
    let (running, connect) = serve_tls(|_| {});
    let flood: Vec<TcpStream> = (0..100)
        .map(|number| running.hold_from(3 + number % 2).stream)
        .collect();
    let other = running.hold_from(5).stream;
    let [.., mut broken] = hold_the_loop(&running, connect, "");
    for client in flood.iter().chain([&other]) {
        (&*client)
            .write_all(&client_hello())
            .expect("the system takes it");
    }
    running.release_loop();
    assert_eq!(broken.reply().status, 400);
    assert_eq!(
        other
            .peek(&mut [0])
            .expect("the server's part of the handshake"),
        1
    );
    let is_answered = |client: &&TcpStream| {
        client
            .set_nonblocking(true)
            .expect("an option of the socket");
        client.peek(&mut [0]).is_ok()
    };
    let before = flood.iter().filter(is_answered).count();
    assert!(before < 50, "{before} were answered before the other's");
}

/// A handshake whose client has gone costs nothing more.
#[test]
fn a_client_that_leaves_its_handshake_is_closed_at_once() {
    let (running, connect) = serve_tls(|_| {});
    let strangers: Vec<TcpStream> = (0..20).map(|_| running.hold_from(3).stream).collect();
    let [_growing, _idle, mut broken] = hold_the_loop(&running, connect, "");
    for stranger in &strangers {
        (&*stranger)
            .write_all(&client_hello())
            .expect("the system takes it");
        stranger
            .shutdown(Shutdown::Write)
            .expect("it can be shut down");
    }
    running.release_loop();
    assert_eq!(broken.reply().status, 400);
    for mut stranger in strangers {
        let received = stranger.read_to_end(&mut Vec::new()).unwrap_or_default();
        assert_eq!(received, 0, "the server's part of the handshake");
    }
}
