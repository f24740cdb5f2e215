//! Messages to systemd: datagrams of `NAME=value` lines (sd_notify(3)).

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

pub struct Notify {
    socket: UnixDatagram,
    manager: SocketAddr,
    /// The watchdog interval, if the service manager has set one.
    pub watchdog: Option<Duration>,
}

impl Notify {
    /// Returns `None` if there is no service manager to notify.
    pub fn from_environment() -> io::Result<Option<Self>> {
        let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let number = |name| env::var(name).ok()?.parse::<u64>().ok();
        // A child process inherits the variables of the service.
        let has_own_pid = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(process::id()));
        let watchdog = number("WATCHDOG_USEC")
            .filter(|&time| has_own_pid && time > 0)
            .map(Duration::from_micros);
        Self::new(&name, watchdog).map(Some)
    }

    /// Connects to the socket of this name: a path, or after an `@` an abstract socket.
    pub fn new(name: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let manager = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        Ok(Self {
            socket: UnixDatagram::unbound()?,
            manager,
            watchdog,
        })
    }

    pub fn send(&self, lines: &str) {
        if let Err(error) = self.socket.send_to_addr(lines.as_bytes(), &self.manager) {
            log::warn!("could not notify the service manager of {lines:?}: {error}");
        }
    }

    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        self.send(&format!(
            "RELOADING=1\nMONOTONIC_USEC={}",
            now.tv_sec * 1_000_000 + now.tv_nsec / 1000
        ));
    }
}
