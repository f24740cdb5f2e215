//! The limits of the process: core files, file descriptors and threads.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::error::CliError;

/// The file descriptors of a worker, besides its client's: the connections to the runtime and to
/// Search.
const FILES_PER_WORKER: usize = 2;

/// The file descriptors of the process itself: the files of SQLite and of the embedded index, the
/// connections to PostgreSQL, and some to spare.
const OWN_FILES: usize = 64;

/// The fewest connections, however few descriptors there are.
const FEWEST_CONNECTIONS: usize = 16;

/// A core file would keep prompts and keys, and outside systemd nothing else prevents it.
pub(super) fn forbid_core_files() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // A limit can always be lowered.
    let _ = setrlimit(Resource::Core, none);
}

/// Lowers `wanted` to the connections that the limit on file descriptors allows, besides those of
/// the workers: a flood of clients must not keep a worker from opening its files.
pub(super) fn connections_that_fit(wanted: usize, workers: usize) -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // The soft limit is low for the sake of programs that use select(); the hard limit is the
        // operator's choice.
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit {
                current: maximum,
                maximum,
            },
        );
    }
    let Some(most) = getrlimit(Resource::Nofile).current else {
        return wanted;
    };
    let reserved = workers * FILES_PER_WORKER + OWN_FILES;
    let capacity = usize::try_from(most)
        .unwrap_or(usize::MAX)
        .saturating_sub(reserved)
        .max(FEWEST_CONNECTIONS);
    if capacity < wanted {
        log::warn!(
            "at most {capacity} connections instead of {wanted}: the process may open {most} files. \
             Raise the limit (LimitNOFILE= in the unit, ulimit -n in a shell) or lower max_connections."
        );
    }
    capacity.min(wanted)
}

pub(super) fn too_few_threads(error: io::Error) -> CliError {
    CliError::failed(format!(
        "can't start all threads: {error}. Raise the limit on threads (TasksMax= in the unit, \
         ulimit -u in a shell, --pids-limit of a container) or on memory, or lower workers."
    ))
}
