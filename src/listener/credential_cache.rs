//! A cache of the keys and sessions that were accepted lately. It decides in which lane a request
//! waits, never whether its key is valid.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::queue::{LaneName, MAX_CACHED};
use crate::mutex::lock;
use crate::secret::SecretDigest;

/// The digests with their lanes, and when they were last used.
#[derive(Default)]
pub(super) struct CredentialCache(Mutex<HashMap<SecretDigest, (Arc<str>, Instant)>>);

impl CredentialCache {
    /// Returns the lane of a digest, and counts this as a use.
    pub fn use_lane(&self, digest: &SecretDigest) -> LaneName {
        let mut lanes = lock(&self.0);
        let (name, used) = lanes.get_mut(digest)?;
        *used = Instant::now();
        Some(Arc::clone(name))
    }

    /// Adds a digest. If there are too many, the longest unused one goes.
    pub fn insert(&self, digest: SecretDigest, name: Arc<str>) {
        let mut lanes = lock(&self.0);
        lanes.insert(digest, (name, Instant::now()));
        if lanes.len() > MAX_CACHED {
            let oldest = lanes
                .iter()
                .min_by_key(|(_, (_, used))| *used)
                .map(|(digest, _)| *digest);
            oldest.and_then(|digest| lanes.remove(&digest));
        }
    }

    pub fn remove_lane(&self, name: &str) {
        lock(&self.0).retain(|_, (other, _)| **other != *name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_digests_are_remembered() {
        let cache = CredentialCache::default();
        let digest = |number: usize| SecretDigest::of(&number.to_string());
        (0..MAX_CACHED).for_each(|number| cache.insert(digest(number), "a".into()));
        assert!(cache.use_lane(&digest(0)).is_some(), "this use counts");
        cache.insert(digest(MAX_CACHED), "b".into());
        assert_eq!(
            (
                cache.use_lane(&digest(1)),
                cache.use_lane(&digest(0)).as_deref()
            ),
            (None, Some("a"))
        );
        cache.remove_lane("a");
        assert_eq!(
            (
                cache.use_lane(&digest(0)),
                cache.use_lane(&digest(MAX_CACHED)).as_deref()
            ),
            (None, Some("b"))
        );
    }
}
