//! TCP and Unix sockets behind one interface.

use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::{fs, net};

use mio::net::{TcpListener, TcpStream, UnixStream};
use mio::{Interest, Registry, Token};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// An address to listen on: the setting `listen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// A port of 127.0.0.1 and, if the host has it, of `[::1]`. A socket has one of the two.
    Localhost(u16),
}

impl Address {
    /// Returns `None` for a Unix socket.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(address) => Some(address.port()),
            Self::Unix(_) => None,
            Self::Localhost(port) => Some(*port),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Localhost(port) => write!(f, "http://localhost:{port}"),
        }
    }
}

/// A socket that accepts connections. Once it exists, a Unix socket is used like the other kind, and
/// so are its connections.
pub struct ListeningSocket {
    listener: TcpListener,
    /// With the actual port, if the system chose it.
    pub address: Address,
    /// The file is removed at the end: it is a Unix socket that this process made.
    is_made: bool,
}

/// Connections that the system keeps until they are accepted; it has a limit of its own, usually
/// the same. With mio's 128, a burst of 2,000 clients took 10 s: the system drops what is beyond,
/// and a client tries again after a second.
const BACKLOG: i32 = 4096;

/// How many ports are tried until one is free on both addresses of `localhost`.
const MAX_PORTS_TRIED: u32 = 16;

const NEW_SOCKET: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl ListeningSocket {
    /// Listens on an address, on `localhost` with two sockets. The file of a Unix socket gets this
    /// mode. An error comes with the address that can't be used.
    pub fn bind(address: &Address, unix_mode: u32) -> Result<Vec<Self>, (Address, io::Error)> {
        let socket = match address {
            Address::Tcp(address) => Self::listen_on_tcp(*address),
            Address::Unix(path) => Self::listen_on_unix(path, unix_mode),
            Address::Localhost(port) => {
                let both = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
                return Self::listen_on_both(both, *port);
            }
        };
        let socket = socket.map_err(|error| (address.clone(), error))?;
        Ok(vec![socket])
    }

    /// Listens on a port of both addresses, or of none: a client that tries the other one first
    /// would send its key to any local user who listens there. A host may lack the second address.
    fn listen_on_both(
        [first, second]: [IpAddr; 2],
        port: u16,
    ) -> Result<Vec<Self>, (Address, io::Error)> {
        let listen = |address: SocketAddr| {
            Self::listen_on_tcp(address).map_err(|error| (Address::Tcp(address), error))
        };
        let mut tried = 0;
        loop {
            let socket = listen((first, port).into())?;
            let chosen = socket.address.port().unwrap_or(port);
            let (address, error) = match listen((second, chosen).into()) {
                Ok(other) => return Ok(vec![socket, other]),
                Err(error) => error,
            };
            if is_missing(&error) {
                return Ok(vec![socket]);
            }
            tried += 1;
            if port != 0 || error.kind() != io::ErrorKind::AddrInUse || tried == MAX_PORTS_TRIED {
                return Err((address, error));
            }
        }
    }

    fn listen_on_tcp(address: SocketAddr) -> io::Result<Self> {
        let listener = net::TcpListener::bind(address)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Self::inherited_tcp(listener)
    }

    fn listen_on_unix(path: &Path, mode: u32) -> io::Result<Self> {
        remove_stale(path)?;
        let listener = bind_unix(path, mode)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let mut socket = Self::inherited_unix(listener)?;
        socket.is_made = true;
        // The umask may have removed some of it.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        Ok(socket)
    }

    /// A socket that another process made and listens on.
    pub fn inherited_tcp(listener: net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = Address::Tcp(listener.local_addr()?);
        Ok(Self {
            listener: TcpListener::from_std(listener),
            address,
            is_made: false,
        })
    }

    pub fn inherited_unix(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = Address::Unix(
            listener
                .local_addr()?
                .as_pathname()
                .unwrap_or(Path::new(""))
                .into(),
        );
        Ok(Self {
            listener: OwnedFd::from(listener).into(),
            address,
            is_made: false,
        })
    }

    pub(super) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        registry.register(&mut self.listener, token, Interest::READABLE)
    }

    /// The next connection, and the address that it comes from; a Unix socket has none.
    pub(super) fn accept(&self) -> io::Result<(TcpStream, Option<IpAddr>)> {
        let (stream, from) = rustix::net::acceptfrom_with(&self.listener, NEW_SOCKET)?;
        let stream = TcpStream::from(stream);
        let from: Option<SocketAddr> = match self.address {
            Address::Unix(_) => None,
            _ => Some(from.ok_or(io::ErrorKind::ConnectionAborted)?.try_into()?),
        };
        if from.is_some() {
            // A response is one write: Nagle's algorithm would only delay it. On a connection that
            // is already closed this fails, and the next read notices it.
            let _ = stream.set_nodelay(true);
        }
        // A dual-stack socket reports IPv4 addresses as IPv4-mapped IPv6 addresses.
        Ok((stream, from.map(|from| from.ip().to_canonical())))
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        if let (Address::Unix(path), true) = (&self.address, self.is_made) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns true if the host does not have an address: its IPv6 is switched off for the interface, or
/// for the whole system.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)
    )
}

/// Removes the socket file that a killed process left behind, and only that: not another kind of
/// file, and not a socket that may still be in use. The system refuses a connection only if no
/// process listens.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::other(
                "a file that is not a socket is there: choose another path",
            ));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A process listens, and may be too busy to accept: binding says that the address is in
        // use.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}

/// Creates a Unix socket at a path. Its file never has more permissions than `mode`: Linux takes
/// the mode of the new file from the unbound socket, less the umask. Setting the umask itself would
/// affect files that other threads create.
fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, NEW_SOCKET, None)?;
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Writes what can be written without waiting, and returns how many bytes that was.
pub(super) fn write_available(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut written = 0;
    while written < bytes.len() {
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => written += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}

/// Shuts down the sending side: the client sees the end, and can still send.
pub(super) fn finish(stream: &TcpStream) {
    // If the client has already gone, the next read notices it.
    let _ = stream.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_unix_socket_never_has_more_permissions_than_its_mode() {
        let path = std::env::temp_dir().join(format!(
            "adriaticum-{}.sock",
            crate::secret::secret_hex::<8>()
        ));
        let mode = || {
            fs::symlink_metadata(&path)
                .expect("a file")
                .permissions()
                .mode()
                & 0o7777
        };
        let _unfinished = bind_unix(&path, 0o600).expect("a socket");
        assert_eq!(mode() & !0o600, 0, "{:o}", mode());
        fs::remove_file(&path).expect("it should go");
        for wanted in [0o777, 0o660, 0] {
            let _socket =
                ListeningSocket::bind(&Address::Unix(path.clone()), wanted).expect("a socket");
            assert_eq!(mode(), wanted, "whatever the umask is");
        }
    }

    /// Listens on both addresses; returns those that have a socket, or the one that can't be used.
    fn both(second: IpAddr, port: u16) -> Result<Vec<IpAddr>, (Address, io::ErrorKind)> {
        let both = [Ipv4Addr::LOCALHOST.into(), second];
        let sockets = ListeningSocket::listen_on_both(both, port)
            .map_err(|(address, error)| (address, error.kind()))?;
        let ports: Vec<_> = sockets.iter().map(|socket| socket.address.port()).collect();
        assert!(ports.iter().all(|port| *port == ports[0]), "{ports:?}");
        let ip = |socket: ListeningSocket| match socket.address {
            Address::Tcp(address) => address.ip(),
            ref other => panic!("{other}"),
        };
        Ok(sockets.into_iter().map(ip).collect())
    }

    /// 127.0.0.2 takes the place of [::1], which not every host has.
    #[test]
    fn localhost_is_both_addresses_or_none_or_the_one_that_there_is() {
        let first = IpAddr::from(Ipv4Addr::LOCALHOST);
        let second = IpAddr::from([127, 0, 0, 2]);
        assert_eq!(both(second, 0), Ok(vec![first, second]));
        let taken = net::TcpListener::bind((second, 0)).expect("a port");
        let address = taken.local_addr().expect("an address");
        let refused = (Address::Tcp(address), io::ErrorKind::AddrInUse);
        assert_eq!(both(second, address.port()), Err(refused));
        assert!(net::TcpListener::bind((first, address.port())).is_ok());
        // An address of the documentation, which no host has.
        assert_eq!(both([192, 0, 2, 1].into(), 0), Ok(vec![first]));
        for (errno, expected) in [
            (Errno::ADDRNOTAVAIL, true),
            (Errno::AFNOSUPPORT, true),
            (Errno::ADDRINUSE, false),
            (Errno::ACCESS, false),
        ] {
            assert_eq!(is_missing(&errno.into()), expected, "{errno}");
        }
    }

    #[test]
    fn a_burst_of_clients_is_kept_until_it_is_accepted() {
        let socket = ListeningSocket::listen_on_tcp(([127, 0, 0, 1], 0).into()).expect("a port");
        let Address::Tcp(address) = socket.address else {
            panic!("no address")
        };
        let connect = |_| net::TcpStream::connect_timeout(&address, Duration::from_secs(20));
        let clients: Vec<_> = (0..300)
            .map(connect)
            .collect::<io::Result<_>>()
            .expect("all connect");
        for client in &clients {
            assert_eq!(
                socket.accept().expect("it is there").1,
                client.local_addr().ok().map(|it| it.ip())
            );
        }
    }
}
