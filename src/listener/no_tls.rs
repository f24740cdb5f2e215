//! What stands in for TLS in a build without it: types that nothing can be made of.

use std::convert::Infallible;
use std::io;
use std::path::Path;

use super::socket::Stream;

pub struct Acceptor(Infallible);
pub struct Certificate(Infallible);
pub(super) struct Session(Infallible);

#[derive(Debug)]
pub enum TlsError {
    Certificate(String),
    Key(String),
}

pub(super) enum Received {
    #[expect(dead_code, reason = "nothing is received")]
    Some { is_all: bool },
    #[expect(dead_code, reason = "nothing is received")]
    End,
}

impl Certificate {
    pub fn read(_: &Path, _: &Path) -> Result<Self, TlsError> {
        Err(TlsError::Certificate("this program was built without TLS (the feature tls)".into()))
    }
}

impl Acceptor {
    pub fn new(certificate: Certificate) -> Result<Self, Infallible> {
        match certificate.0 {}
    }

    pub fn show(&self, _: Certificate) {
        match self.0 {}
    }

    pub(super) fn accept(&self) -> Result<Session, Infallible> {
        match self.0 {}
    }
}

impl Session {
    pub fn is_half_shaken(&self) -> bool {
        match self.0 {}
    }

    pub fn is_handshaking(&self) -> bool {
        match self.0 {}
    }

    pub fn read(&mut self, _: &mut [u8]) -> io::Result<Option<usize>> {
        match self.0 {}
    }

    pub fn receive(&mut self, _: &Stream) -> io::Result<Received> {
        match self.0 {}
    }

    pub fn rest(&mut self) {
        match self.0 {}
    }

    pub fn write(&mut self, _: &Stream, _: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub fn is_flushed(&self) -> bool {
        match self.0 {}
    }

    pub fn flush(&mut self, _: &Stream) -> io::Result<bool> {
        match self.0 {}
    }

    pub fn finish(&mut self, _: &Stream) {
        match self.0 {}
    }

    pub fn weight(&self) -> usize {
        match self.0 {}
    }
}
