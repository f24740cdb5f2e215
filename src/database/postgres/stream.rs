//! The bytes to and from a server: a TCP or Unix socket whose every read and write ends at a
//! deadline, plain or with TLS.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Stream};

use super::uri::Host;
use crate::timed_stream::TimedStream;

pub struct PgStream {
    pub socket: TimedStream,
    tls: Option<ClientConnection>,
}

impl PgStream {
    pub fn connect(host: &Host, deadline: Instant) -> io::Result<Self> {
        let socket = match host {
            Host::Tcp { name, port } => {
                TimedStream::connect(look_up(name, *port, deadline)?, deadline)?
            }
            // Once it is connected, a Unix socket is used like the other kind.
            Host::Unix(path) => TimedStream::new(
                TcpStream::from(OwnedFd::from(UnixStream::connect(path)?)),
                deadline,
            ),
        };
        Ok(Self { socket, tls: None })
    }

    /// Starts TLS.
    pub fn encrypt(
        &mut self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> io::Result<()> {
        let mut session = ClientConnection::new(config, name).map_err(io::Error::other)?;
        session.complete_io(&mut self.socket)?;
        self.tls = Some(session);
        Ok(())
    }

    /// The server's own certificate; `None` without TLS.
    pub fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.tls.as_ref()?.peer_certificates()?.first()
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &mut self.tls else {
            return self.socket.write_all(bytes);
        };
        let mut stream = Stream::new(tls, &mut self.socket);
        stream.write_all(bytes)?;
        stream.flush()
    }

    /// Returns how many bytes came; at the end of the connection that is an error.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = match &mut self.tls {
            None => self.socket.read(buffer)?,
            Some(tls) => Stream::new(tls, &mut self.socket).read(buffer)?,
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
    let left = deadline.saturating_duration_since(Instant::now());
    let late = || {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "its name could not be looked up in time",
        )
    };
    done.recv_timeout(left).unwrap_or_else(|_| Err(late()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_look_up_ends_at_the_deadline() {
        let soon = Instant::now() + Duration::from_secs(60);
        assert_eq!(
            look_up("::1", 7, soon).expect("an address"),
            [SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 7))]
        );
        // A name that the system's resolver knows even where /etc/hosts is missing.
        assert_eq!(
            look_up("127.1", 7, soon).expect("a name"),
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
