//! More clients than there is room for, and clients that misbehave.

use std::io::Write;
use std::net::TcpStream;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support::{Client, Runtime, Server, chat, connect_from, request, until};

#[test]
fn thousands_of_slow_clients_cost_no_thread() {
    // This process holds the other end of every connection.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    )
    .expect("the limit can be raised");
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.complete(&key).is_completion();
    let threads = server.threads();
    let whole = request(&key, &chat("x"));
    let connect = || TcpStream::connect(&server.address).expect("a connection");
    let idle: Vec<TcpStream> = (0..2000).map(|_| connect()).collect();
    // From another address: one address has half of the connections.
    let address = server.address.parse().expect("an address");
    let mut half: Vec<TcpStream> = (0..500)
        .map(|_| connect_from([127, 0, 0, 2], address))
        .collect();
    for (number, stream) in half.iter_mut().enumerate() {
        let sent = 1 + number * (whole.len() - 2) / 500;
        stream
            .write_all(&whole.as_bytes()[..sent])
            .expect("a part should be taken");
    }
    for _ in 0..100 {
        server.complete(&key).is_completion();
    }
    assert_eq!(server.threads(), threads, "threads are fixed at the start");
    assert!(
        server.status("VmRSS") < 32 * 1024,
        "{} KiB",
        server.status("VmRSS")
    );
    // The slow ones are served too, once their requests are complete.
    for (number, mut stream) in half.into_iter().enumerate().step_by(100) {
        let sent = 1 + number * (whole.len() - 2) / 500;
        stream
            .write_all(&whole.as_bytes()[sent..])
            .expect("the rest should be taken");
        Client::new(stream).reply().is_completion();
    }
    drop(idle);
}

#[test]
fn running_out_of_file_descriptors_is_no_end() {
    let runtime = Runtime::start();
    // 30 descriptors, not counting those inherited from the process that runs the tests.
    let limit = "ulimit -n $((26 + $(ls /proc/self/fd | wc -l))); exec \"$@\"";
    let server = Server::new(Some(&runtime)).start_with(&["sh", "-c", limit, "sh"]);
    let key = server.key();
    let whole = request(&key, &chat("x"));
    let address = server.address.parse().expect("an address");
    // Unfinished, and from several addresses: together they take every descriptor.
    let flood: Vec<TcpStream> = (0..100)
        .map(|number| {
            let mut stream = connect_from([127, 0, 0, 3 + number % 5], address);
            stream.write_all(b"POST").expect("the system takes it");
            stream
        })
        .collect();
    let is_served = || {
        let mut client = Client::new(connect_from([127, 0, 0, 2], address));
        client.ask(&whole).status == 200
    };
    until("another is served beside them", is_served);
    drop(flood);
    until("and after them", is_served);
    server.has_logged("at most 16 connections instead of 4096");
}
