//! The bytes to and from a server: a TCP or Unix socket whose every read and write ends at a deadline, plain or with TLS.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::uri::Host;

/// A socket, and when to give up waiting for it.
pub(super) struct Timed {
    socket: TcpStream,
    deadline: Instant,
}

pub(super) enum Link {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Link {
    pub fn connect(host: &Host, deadline: Instant) -> io::Result<Self> {
        let socket = match host {
            Host::Tcp { name, port } => connect_tcp(name, *port, deadline)?,
            // Once it is connected, a Unix socket is used like the other kind.
            Host::Unix(path) => TcpStream::from(OwnedFd::from(UnixStream::connect(path)?)),
        };
        Ok(Self::Plain(Timed { socket, deadline }))
    }

    /// Starts TLS on a plain link.
    pub fn encrypt(self, config: Arc<ClientConfig>, name: ServerName<'static>) -> io::Result<Self> {
        let Self::Plain(mut socket) = self else {
            return Ok(self);
        };
        let mut session = ClientConnection::new(config, name).map_err(io::Error::other)?;
        session.complete_io(&mut socket)?;
        Ok(Self::Tls(Box::new(StreamOwned::new(session, socket))))
    }

    /// The server's own certificate; `None` without TLS.
    pub fn certificate(&self) -> Option<&CertificateDer<'static>> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => stream.conn.peer_certificates()?.first(),
        }
    }

    pub fn set_deadline(&mut self, deadline: Instant) {
        self.timed().deadline = deadline;
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }

    /// Returns how many bytes came; at the end of the connection that is an error.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = match self {
            Self::Plain(socket) => socket.read(buffer)?,
            Self::Tls(stream) => stream.read(buffer)?,
        };
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has closed the connection"));
        }
        Ok(count)
    }

    /// Whether the server has neither closed the connection nor sent unrequested bytes.
    pub fn is_quiet(&mut self) -> bool {
        let waiting = recv(&self.timed().socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(waiting, Err(Errno::AGAIN))
    }

    fn timed(&mut self) -> &mut Timed {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &mut stream.sock,
        }
    }
}

impl Timed {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(too_late()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(buffer).map_err(timeout)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes).map_err(timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn timeout(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { too_late() } else { error }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time")
}

/// Connects to the first address of a name that can be reached.
fn connect_tcp(name: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut addresses = look_up(name, port, deadline)?.into_iter().peekable();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    while let Some(address) = addresses.next() {
        let left = deadline.saturating_duration_since(Instant::now());
        // One that does not answer leaves time for the next.
        let time = if addresses.peek().is_some() { left / 2 } else { left };
        match TcpStream::connect_timeout(&address, time.max(Duration::from_millis(1))) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                return Ok(socket);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn look_up(name: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = name.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let name = name.to_owned();
    within(deadline, move || Ok((name.as_str(), port).to_socket_addrs()?.collect()))
}

/// Does something that has no deadline of its own, as the system's look-up of names. It ends by itself some time later.
fn within<T: Send + 'static>(
    deadline: Instant,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, done) = mpsc::channel();
    thread::Builder::new().name("name look-up".into()).spawn(move || drop(sender.send(work())))?;
    let left = deadline.saturating_duration_since(Instant::now());
    let late = || io::Error::new(io::ErrorKind::TimedOut, "its name could not be looked up in time");
    done.recv_timeout(left).unwrap_or_else(|_| Err(late()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_up_ends_at_the_deadline() {
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(
            look_up("::1", 7, soon).expect("an address"),
            [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 7))]
        );
        assert!(look_up("localhost", 7, soon).expect("a name").iter().all(|it| it.ip().is_loopback()));
        let (_hold, never) = mpsc::channel::<()>();
        let began = Instant::now();
        let late = within(began + Duration::from_millis(50), move || {
            let _ = never.recv();
            Ok(())
        });
        assert_eq!(late.expect_err("it never ends").kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
