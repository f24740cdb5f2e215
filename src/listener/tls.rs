//! TLS on the listener's thread. A session never blocks: it belongs to the event loop, which
//! decrypts what a client sends and encrypts the responses.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use mio::net::TcpStream;
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::{self, PemObject};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, ServerConnection};

use crate::certificates;
use crate::files;
use crate::locks::lock;

/// The memory of a session besides the bytes in transit: its keys, its state and its smallest
/// buffers. `rustls` does not report it. Measured over 1,000 sessions: 7.7 KiB after the handshake,
/// 9.3 after a completion.
const OWN_BYTES: usize = 10 * 1024;

/// The bytes of a response that are encrypted ahead of what the socket takes.
const AHEAD: usize = 64 * 1024;

/// Begins sessions with the current certificate.
pub struct Acceptor {
    config: Arc<ServerConfig>,
    current: Arc<CurrentCertificate>,
}

/// A certificate and its key, read and found to belong together.
#[derive(Clone, Debug)]
pub struct Certificate {
    certified: Arc<CertifiedKey>,
    pub path: PathBuf,
}

/// The reason why there is no certificate: the file, and what is wrong with it.
#[derive(Debug)]
pub enum TlsError {
    Certificate(String),
    Key(String),
}

impl Certificate {
    pub fn read(path: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain =
            certificates::read(path).map_err(|error| TlsError::Certificate(error.to_string()))?;
        let text = files::read(key).map_err(|error| TlsError::Key(error.to_string()))?;
        // The messages repeat nothing of the file.
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
            pem::Error::NoItemsFound => {
                TlsError::Key("there is no such part in it, or not in PEM".into())
            }
            _ => TlsError::Key("it is not valid PEM".into()),
        })?;
        let certified =
            CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| {
                TlsError::Key(format!("it does not match the certificate: {error}"))
            })?;
        Ok(Self {
            certified: Arc::new(certified),
            path: path.to_owned(),
        })
    }

    /// The first and the last second in which it is valid, in Unix time; `None` if that can't be
    /// read.
    pub fn validity(&self) -> Option<[i64; 2]> {
        certificates::validity(self.certified.cert.first()?)
    }
}

impl Acceptor {
    pub fn new(certificate: Certificate) -> Result<Self, rustls::Error> {
        let current = Arc::new(CurrentCertificate(Mutex::new(certificate)));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&current) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        // Session tickets: the client keeps the encrypted state for a resumption, so none is kept
        // here.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = ring::Ticketer::new()?;
        config.send_tls13_tickets = 1;
        Ok(Self {
            config: Arc::new(config),
            current,
        })
    }

    /// Uses this certificate for new connections. Established sessions continue. Returns whether it
    /// is another one.
    pub fn replace_certificate(&self, certificate: Certificate) -> bool {
        let mut current = lock(&self.current.0);
        let is_new = current.certified.cert != certificate.certified.cert;
        *current = certificate;
        is_new
    }

    /// The certificate of new connections.
    pub fn certificate(&self) -> Certificate {
        lock(&self.current.0).clone()
    }

    /// When it expires, in Unix seconds.
    pub fn expires(&self) -> Option<i64> {
        self.certificate().validity().map(|[_, end]| end)
    }

    pub(super) fn accept(&self) -> Result<TlsSession, rustls::Error> {
        let mut connection = ServerConnection::new(Arc::clone(&self.config))?;
        connection.set_buffer_limit(Some(AHEAD));
        Ok(TlsSession {
            connection,
            unread: 0,
            unsent: 0,
        })
    }
}

/// The certificate that new handshakes use.
#[derive(Debug)]
struct CurrentCertificate(Mutex<Certificate>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&lock(&self.0).certified))
    }
}

/// One client's session.
pub(super) struct TlsSession {
    connection: ServerConnection,
    /// Bytes that were received and not passed on yet: a part of a record or of the handshake.
    unread: usize,
    /// Bytes that were taken to be sent and are not sent yet.
    unsent: usize,
}

impl TlsSession {
    /// Returns true if the client has begun its handshake and not ended it.
    pub fn is_handshaking(&self) -> bool {
        !self.is_established() && self.unread > 0
    }

    pub fn is_established(&self) -> bool {
        !self.connection.is_handshaking()
    }

    /// Reads decrypted bytes. Returns 0 at the end, and `None` if more has to be received first.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match self.connection.reader().read(into) {
            Ok(count) => {
                self.unread = 0;
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads from the socket, and sends the handshake messages or the alert that follow from it.
    /// Returns the number of bytes, which is 0 at the end.
    pub fn receive(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        let count = self.connection.read_tls(&mut stream)?;
        if count == 0 {
            return Ok(0);
        }
        self.unread += count;
        let was_established = self.is_established();
        let processed = self.connection.process_new_packets();
        // The alert after an error, else the next message of the handshake.
        self.flush(stream)?;
        processed.map_err(io::Error::other)?;
        if !was_established && self.is_established() {
            self.unread = 0;
        }
        Ok(count)
    }

    /// Frees the buffer of the last request: a large body leaves 32 KiB, and it may be long until
    /// the next request.
    pub fn shrink_buffer(&mut self) {
        // `rustls` makes its buffer smaller before it reads.
        let _ = self.connection.read_tls(&mut NoInput);
    }

    /// Encrypts and sends what can be sent without waiting, and returns how many bytes were taken.
    /// They are sent when nothing is left to be flushed.
    pub fn write(&mut self, stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        while self.flush(stream)? && taken < bytes.len() {
            let count = self.connection.writer().write(&bytes[taken..])?;
            self.unsent += count;
            taken += count;
        }
        Ok(taken)
    }

    /// Sends what is encrypted. Returns whether all of it is sent.
    pub fn flush(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut stream) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.unsent = 0;
        Ok(true)
    }

    pub fn is_flushed(&self) -> bool {
        !self.connection.wants_write()
    }

    /// Sends close_notify, so that the client knows that nothing was cut off.
    pub fn finish(&mut self, stream: &TcpStream) {
        self.connection.send_close_notify();
        // Best effort: the response's own framing also shows its end.
        let _ = self.flush(stream);
    }

    /// The memory that it holds.
    pub fn held_bytes(&self) -> usize {
        OWN_BYTES + self.unread + self.unsent
    }
}

/// A socket without any input.
struct NoInput;

impl Read for NoInput {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }
}
