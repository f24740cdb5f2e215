//! Lanes: what the queue knows of a request's key, and how many of its requests run at once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::store::Digest;

/// How many accepted keys or sessions are remembered. It only decides which lane a request waits in.
pub(super) const REMEMBERED: usize = 1024;

/// A lane's name; `None` is the lane that all strangers share.
pub(super) type Name = Option<Arc<str>>;

/// Whose request it is, once it was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// A key's id.
    pub name: String,
    /// How many of its requests run at once.
    pub limit: Option<u32>,
}

/// What the head of a request decides about its place in the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// The digest of the key or session that it presents.
    pub credential: Option<Digest>,
    /// The lane of a request whose credential is not known; `None` is the lane that all strangers share.
    pub lane: Option<Arc<str>>,
    /// The address of a stranger. If there are too many strangers, the address that sent most loses a request.
    pub origin: Option<IpAddr>,
    /// One of these runs at a time, whatever its lane. The others wait without a thread.
    pub exclusive: bool,
    /// It is a part of a response that has begun: it is never shed, and nothing is shed for it.
    pub is_begun: bool,
}

/// What the queue holds for one key.
#[derive(Debug, PartialEq, Eq)]
pub struct LaneLoad {
    pub name: Arc<str>,
    pub waiting: usize,
    pub running: usize,
    pub limit: Option<u32>,
    /// Since the start.
    pub shed: u64,
    /// The age of the oldest request that waits.
    pub longest_wait: Option<Duration>,
}

/// The digests that were accepted lately, and their lanes.
#[derive(Default)]
pub(super) struct Known {
    lanes: HashMap<Digest, (Name, u64)>,
    /// Counts the uses, to find the least recent.
    uses: u64,
}

impl Known {
    pub fn find(&mut self, digest: &Digest) -> Name {
        let (name, used) = self.lanes.get_mut(digest)?;
        self.uses += 1;
        *used = self.uses;
        name.clone()
    }

    pub fn remember(&mut self, digest: Digest, name: Name) {
        self.uses += 1;
        self.lanes.insert(digest, (name, self.uses));
        if self.lanes.len() > REMEMBERED {
            let oldest = self.lanes.iter().min_by_key(|(_, (_, used))| *used).map(|(digest, _)| *digest);
            oldest.and_then(|digest| self.lanes.remove(&digest));
        }
    }

    pub fn forget(&mut self, name: &Name) {
        self.lanes.retain(|_, (other, _)| other != name);
    }
}
