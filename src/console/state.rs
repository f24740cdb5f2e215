//! The console's state, which all pages share.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::browsers::KnownBrowsers;
use super::sign_in::SignInThrottle;
use super::status::check_runner::CheckRunner;
use crate::config::Config;
use crate::database::Problem;
use crate::ledger::Gateway;
use crate::monitoring::MonitoringEndpoints;
use crate::store::Store;

pub struct Console {
    /// The host that it is served on.
    pub(super) host: String,
    pub(super) config: Arc<Config>,
    pub(super) store: Arc<Store>,
    pub(super) started: Instant,
    pub(super) browsers: KnownBrowsers,
    /// Held while a password is verified: hashing it takes 9 MiB, so one is verified at a time.
    pub(super) sign_ins: Mutex<SignInThrottle>,
    pub(super) checks: CheckRunner,
    /// An export holds a clone until its response was sent.
    pub(super) exports: Arc<()>,
    pub monitoring: MonitoringEndpoints,
}

impl Console {
    /// Fails if the system does not allow another thread.
    pub fn new(
        host: String,
        config: Arc<Config>,
        store: Arc<Store>,
        monitoring: MonitoringEndpoints,
    ) -> io::Result<Self> {
        Ok(Self {
            host,
            browsers: KnownBrowsers::read(&store),
            sign_ins: Mutex::new(SignInThrottle::new()),
            config,
            store,
            started: Instant::now(),
            checks: CheckRunner::new()?,
            exports: Arc::default(),
            monitoring,
        })
    }

    /// The gateways that share the database; empty if it is a file.
    pub(super) fn shared_gateways(&self) -> Result<Vec<Gateway>, Problem> {
        if self.config.database.file().is_some() {
            Ok(Vec::new())
        } else {
            self.store.ledger.gateways()
        }
    }
}
