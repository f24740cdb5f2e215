//! A blocking TCP stream whose every read and write ends at a deadline, for PostgreSQL.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Timeouts are rounded up to this, so that most calls on a kept connection need no setsockopt.
const TIMEOUT_STEP: Duration = Duration::from_millis(125);

#[derive(Debug)]
pub struct TimedStream {
    stream: TcpStream,
    pub deadline: Instant,
    /// The timeout that is set on the socket.
    timeout: Duration,
}

impl TimedStream {
    pub fn new(stream: TcpStream, deadline: Instant) -> Self {
        Self {
            stream,
            deadline,
            timeout: Duration::ZERO,
        }
    }

    /// Connects to the first address that can be reached.
    pub fn connect(
        addresses: impl IntoIterator<Item = SocketAddr>,
        deadline: Instant,
    ) -> io::Result<Self> {
        let mut addresses = addresses.into_iter().peekable();
        let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        while let Some(address) = addresses.next() {
            let left = deadline.saturating_duration_since(Instant::now());
            // One that does not answer leaves time for the next.
            let time = if addresses.peek().is_some() {
                left / 2
            } else {
                left
            };
            match TcpStream::connect_timeout(&address, time.max(Duration::from_millis(1))) {
                Ok(stream) => {
                    // A message is one write: Nagle's algorithm would only delay it.
                    stream.set_nodelay(true)?;
                    return Ok(Self::new(stream, deadline));
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => failure = too_late(),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Returns true if the server has neither closed the connection nor sent unrequested bytes.
    pub fn is_quiet(&self) -> bool {
        let waiting = recv(
            &self.stream,
            &mut [0; 1],
            RecvFlags::PEEK | RecvFlags::DONTWAIT,
        );
        matches!(waiting, Err(Errno::AGAIN))
    }

    /// Repeats a system call while signals interrupt it: the system restarts none on a socket that
    /// has a timeout.
    fn in_time<T>(&mut self, mut call: impl FnMut(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        loop {
            self.set_timeout()?;
            match call(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A socket timeout is reported as this.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(too_late()),
                result => return result,
            }
        }
    }

    fn set_timeout(&mut self) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(too_late());
        }
        let steps = left.as_nanos().div_ceil(TIMEOUT_STEP.as_nanos());
        let timeout = TIMEOUT_STEP.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX));
        if timeout != self.timeout {
            self.stream.set_read_timeout(Some(timeout))?;
            self.stream.set_write_timeout(Some(timeout))?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time")
}

impl Read for TimedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.in_time(|mut stream| stream.read(into))
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.in_time(|mut stream| stream.write(bytes))
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.in_time(|mut stream| stream.write_vectored(parts))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// SIGHUP during a query looked like a lost connection to the database.
    #[test]
    fn a_signal_ends_no_call_and_the_deadline_does() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let soon = Instant::now() + Duration::from_secs(60);
        let mut stream = TimedStream::connect(listener.local_addr(), soon).expect("a connection");
        let mut calls = 0;
        let result = stream.in_time(|_| {
            calls += 1;
            if calls < 3 {
                Err(Errno::INTR.into())
            } else {
                Ok(calls)
            }
        });
        assert_eq!(result.expect("it goes on"), 3);
        stream.deadline = Instant::now() + Duration::from_millis(1);
        let late = stream.read(&mut [0]).expect_err("nothing comes");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }
}
