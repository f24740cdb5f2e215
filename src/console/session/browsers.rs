//! The browsers that were signed in before, and the place of the console's requests in the queue.

use std::sync::Mutex;

use super::cookies::{self, BROWSER, SESSION};
use super::credentials;
use super::throttle::SignInSource;
use crate::database::Problem;
use crate::http::{ClientInfo, Request, RequestHead};
use crate::listener::{Admission, Area};
use crate::mutex::lock;
use crate::secret::SecretDigest;
use crate::store::Store;
use crate::when;

/// The known browsers, for the event loop, which can't query the database. A browser that signed in
/// through another gateway is added when its first request is looked up.
pub struct KnownBrowsers(Mutex<Vec<SecretDigest>>);

impl KnownBrowsers {
    pub fn read(store: &Store) -> Self {
        let browsers = Self(Mutex::default());
        if let Err(error) = browsers.refresh(store) {
            log::warn!("console: could not read the known browsers: {error}");
        }
        browsers
    }

    pub fn refresh(&self, store: &Store) -> Result<(), Problem> {
        let browsers = credentials::known_browsers(store, when::now())?;
        *lock(&self.0) = browsers;
        Ok(())
    }

    pub fn contains(&self, digest: &SecretDigest) -> bool {
        lock(&self.0).contains(digest)
    }

    /// The place of a request in the queue. A known browser has a lane of its own and so have the
    /// clients on this host: unknown clients can neither delay them nor take their places.
    pub fn admit(&self, client: ClientInfo, head: &RequestHead) -> Admission {
        let browser = cookies::digest(client, head, BROWSER).filter(|digest| self.contains(digest));
        let (lane, network) = match SignInSource::new(client, browser) {
            SignInSource::Browser(digest) => (Some(hex::encode(digest.0).into()), None),
            SignInSource::Loopback => (Some("loopback".into()), None),
            SignInSource::Unknown(address) => (None, address),
        };
        Admission {
            area: Area::Console,
            credential: cookies::digest(client, head, SESSION),
            lane,
            network,
        }
    }

    /// Looks up a browser that is not known here. If it is known to another gateway, its next
    /// request has a lane.
    pub fn look_up(&self, store: &Store, request: &Request) {
        let browser = cookies::digest(request.client, &request.head, BROWSER);
        if browser.is_some_and(|digest| !self.contains(&digest)) {
            // On an error it stays unknown. The page itself reports a failing database.
            let _ = self.refresh(store);
        }
    }
}
