//! Lanes: each key or session has one in the queue, with a limit on its concurrent requests.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::mutex::lock;
use crate::secret::SecretDigest;

/// The number of accepted keys or sessions that are remembered. It only decides which lane a request waits in.
pub(super) const REMEMBERED: usize = 1024;

/// A lane's name; `None` is the lane that all strangers share.
pub(super) type Name = Option<Arc<str>>;

/// The lane of a key, once it was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// A key's id.
    pub name: String,
    /// The limit on its concurrent requests.
    pub limit: Option<u32>,
}

/// The place of a request in the queue, as its head decides it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// The digest of the key or session that it presents.
    pub credential: Option<SecretDigest>,
    /// The lane of a request whose credential is not known; `None` is the lane that all strangers share.
    pub lane: Option<Arc<str>>,
    /// The address of a stranger. If there are too many strangers, the address that sent most loses a request.
    pub origin: Option<IpAddr>,
    /// One of these runs at a time, whatever its lane. The others wait without a thread.
    pub exclusive: bool,
    /// It is a part of a response that has begun: it is never shed, and nothing is shed for it.
    pub is_begun: bool,
}

/// The requests of one key in the queue.
#[derive(Debug, PartialEq, Eq)]
pub struct LaneLoad {
    pub name: Arc<str>,
    pub waiting: usize,
    pub running: usize,
    pub limit: Option<u32>,
    /// Requests shed since the start.
    pub shed: u64,
    /// The age of the oldest request that waits.
    pub longest_wait: Option<Duration>,
}

/// The digests of keys and sessions that were accepted lately, with their lanes and when they were last used.
#[derive(Default)]
pub(super) struct KnownLanes(Mutex<HashMap<SecretDigest, (Arc<str>, Instant)>>);

impl KnownLanes {
    pub fn find(&self, digest: &SecretDigest) -> Name {
        let mut lanes = lock(&self.0);
        let (name, used) = lanes.get_mut(digest)?;
        *used = Instant::now();
        Some(Arc::clone(name))
    }

    pub fn remember(&self, digest: SecretDigest, name: Arc<str>) {
        let mut lanes = lock(&self.0);
        lanes.insert(digest, (name, Instant::now()));
        if lanes.len() > REMEMBERED {
            let oldest = lanes.iter().min_by_key(|(_, (_, used))| *used).map(|(digest, _)| *digest);
            oldest.and_then(|digest| lanes.remove(&digest));
        }
    }

    pub fn forget(&self, name: &str) {
        lock(&self.0).retain(|_, (other, _)| **other != *name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_digests_are_remembered() {
        let known = KnownLanes::default();
        let digest = |number: usize| SecretDigest::of(&number.to_string());
        (0..REMEMBERED).for_each(|number| known.remember(digest(number), "a".into()));
        assert!(known.find(&digest(0)).is_some(), "this use counts");
        known.remember(digest(REMEMBERED), "b".into());
        assert_eq!((known.find(&digest(1)), known.find(&digest(0)).as_deref()), (None, Some("a")));
        known.forget("a");
        assert_eq!((known.find(&digest(0)), known.find(&digest(REMEMBERED)).as_deref()), (None, Some("b")));
    }
}
