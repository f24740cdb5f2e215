//! The bytes to and from a server: a TCP or Unix socket whose every read and write ends at a
//! deadline, plain or with TLS.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Stream};

use crate::certificates;
use crate::database::location::Host;

/// The next step if a CA is not trusted.
const SET_ROOT: &str = ": set sslrootcert to the file of its CA";

pub struct PgStream {
    pub socket: Socket,
    tls: Option<Box<ClientConnection>>,
}

/// A blocking socket with a deadline.
pub struct Socket {
    /// A Unix socket, once it is connected, is used like one of TCP.
    stream: TcpStream,
    pub deadline: Instant,
}

impl PgStream {
    pub fn connect(host: &Host, deadline: Instant) -> io::Result<Self> {
        let stream = match host {
            Host::Tcp { name, port } => connect_tcp(look_up(name, *port, deadline)?, deadline)?,
            Host::Unix(path) => connect_unix(path, deadline)?,
        };
        let socket = Socket { stream, deadline };
        Ok(Self { socket, tls: None })
    }

    /// Starts TLS with a server that has agreed to it.
    pub fn encrypt(&mut self, config: &Arc<ClientConfig>, name: &str) -> io::Result<()> {
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let mut session =
            ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        session
            .complete_io(&mut self.socket)
            .map_err(|error| certificates::explain(error, SET_ROOT))?;
        self.tls = Some(Box::new(session));
        Ok(())
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return self.socket.write_all(bytes);
        };
        let mut stream = Stream::new(&mut **tls, &mut self.socket);
        stream.write_all(bytes)?;
        stream.flush()
    }

    /// Returns how many bytes came; at the end of the connection that is an error.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = match &mut self.tls {
            None => self.socket.read(buffer)?,
            Some(tls) => Stream::new(&mut **tls, &mut self.socket).read(buffer)?,
        };
        if count == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the server has closed the connection",
            ));
        }
        Ok(count)
    }
}

impl Socket {
    /// Returns true if the server has neither closed the connection nor sent unrequested bytes.
    pub fn is_quiet(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(
            net::recv(&self.stream, &mut [0; 1], flags),
            Err(Errno::AGAIN)
        )
    }

    /// Repeats a system call while signals interrupt it: the system restarts none on a socket that
    /// has a timeout.
    fn in_time<T>(&self, mut call: impl FnMut(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        loop {
            let left = Some(time_left(self.deadline)?);
            self.stream.set_read_timeout(left)?;
            self.stream.set_write_timeout(left)?;
            match call(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map_err(late),
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.in_time(|mut stream| stream.read(into))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.in_time(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(too_late()),
        left => Ok(left),
    }
}

/// A socket's timeout is reported as one of these.
fn late(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => too_late(),
        _ => error,
    }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time")
}

/// Connects to the first address that can be reached.
fn connect_tcp(addresses: Vec<SocketAddr>, deadline: Instant) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (tried, address) in addresses.iter().enumerate() {
        // One that does not answer leaves time for the others.
        let share = time_left(deadline)? / (addresses.len() - tried) as u32;
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(stream) => {
                // A message is one write: Nagle's algorithm would only delay it.
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => failure = late(error),
        }
    }
    Err(failure)
}

fn connect_unix(path: &Path, deadline: Instant) -> io::Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // It also ends a wait for the server's full queue.
    set_socket_timeout(&socket, Timeout::Send, Some(time_left(deadline)?))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| late(error.into()))?;
    Ok(TcpStream::from(socket))
}

fn look_up(name: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let name = name.to_owned();
    within(deadline, move || {
        Ok((name.as_str(), port).to_socket_addrs()?.collect())
    })
}

/// Does something that has no deadline of its own, as the system's look-up of names. It ends by
/// itself some time later.
fn within<T: Send + 'static>(
    deadline: Instant,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, done) = mpsc::channel();
    thread::Builder::new()
        .name("name look-up".into())
        .spawn(move || drop(sender.send(work())))?;
    let late = || {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "its name could not be looked up in time",
        )
    };
    done.recv_timeout(time_left(deadline)?)
        .unwrap_or_else(|_| Err(late()))
}

/// TLS that trusts the CAs of a file, or those of the system.
pub fn tls_config(sslrootcert: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let roots = match sslrootcert {
        Some(path) => certificates::read_roots(path)
            .map_err(|error| format!("sslrootcert {}: {error}", path.display()))?,
        None => certificates::load_system_roots(),
    };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("the provider should support the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    /// SIGHUP during a query looked like a lost connection to the database.
    #[test]
    fn a_signal_ends_no_call_and_the_deadline_does() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let host = Host::Tcp {
            name: "127.0.0.1".into(),
            port: listener.local_addr().expect("its address").port(),
        };
        let mut socket = PgStream::connect(&host, soon())
            .expect("a connection")
            .socket;
        let mut calls = 0;
        let result = socket.in_time(|_| {
            calls += 1;
            if calls < 3 {
                Err(Errno::INTR.into())
            } else {
                Ok(calls)
            }
        });
        assert_eq!(result.expect("it goes on"), 3);
        socket.deadline = Instant::now() + Duration::from_millis(1);
        let late = socket.read(&mut [0]).expect_err("nothing comes");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_unix_socket_whose_queue_is_full_is_given_up_at_the_deadline() {
        let folder =
            std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        std::fs::create_dir(&folder).expect("a folder");
        let path = folder.join("socket");
        let listener = UnixListener::bind(&path).expect("a socket");
        net::listen(&listener, 0).expect("a queue of one");
        let _waiting = UnixStream::connect(&path).expect("a place in the queue");
        let began = Instant::now();
        let late = PgStream::connect(
            &Host::Unix(path.clone()),
            began + Duration::from_millis(200),
        );
        let late = late.err().expect("there is no room");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "{late}");
        assert!(began.elapsed() < Duration::from_secs(30));
        let _ = listener.accept();
        PgStream::connect(&Host::Unix(path), soon()).expect("there is room again");
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn a_look_up_ends_at_the_deadline() {
        assert_eq!(
            look_up("::1", 7, soon()).expect("an address"),
            [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 7))]
        );
        // A name that the system's resolver knows even where /etc/hosts is missing.
        assert_eq!(
            look_up("127.1", 7, soon()).expect("a name"),
            [SocketAddr::from(([127, 0, 0, 1], 7))]
        );
        let (_hold, never) = mpsc::channel::<()>();
        let began = Instant::now();
        let late = within(began + Duration::from_millis(50), move || {
            let _ = never.recv();
            Ok(())
        });
        assert_eq!(
            late.expect_err("it never ends").kind(),
            io::ErrorKind::TimedOut
        );
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
