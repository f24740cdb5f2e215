//! The threads that answer requests: the API's workers and the console's.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::connection::Outgoing;
use super::queue::{FairQueue, Job, Work};
use super::running_request::{RunningRequest, contain_panic};
use super::state::{CONSOLE_CAPACITY, ListenerState};
use super::{Destination, Service, unknown_keys};
use crate::http::response::chunk;

/// While the API is busy, a console thread pauses after each job for this many times as long as the
/// job took, a quarter of a second at most. Without it, constant use of the console cost the API
/// 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

type ThreadMain<S> = fn(&ListenerState, &S);

/// Starts the threads of all queues. They end when the queues are closed.
pub(super) fn start<S: Service>(
    state: &Arc<ListenerState>,
    service: &Arc<S>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let groups: [(&str, usize, ThreadMain<S>); 3] = [
        ("worker", state.limits.workers, work_for_api),
        ("unknown-keys", 1, unknown_keys::run),
        ("console", CONSOLE_CAPACITY.threads, work_for_console),
    ];
    let start = |name: &str, run: ThreadMain<S>| {
        let (state, service) = (Arc::clone(state), Arc::clone(service));
        thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&state, &service))
    };
    let threads = groups
        .into_iter()
        .flat_map(|(name, count, run)| (0..count).map(move |_| start(name, run)));
    threads
        .collect::<io::Result<_>>()
        .inspect_err(|_| state.close())
}

fn work_for_api<S: Service>(state: &ListenerState, service: &S) {
    while let Ok(job) = state.api.take(None) {
        state.note_work();
        contain_panic(|| serve(state, service, &state.api, job));
    }
}

fn work_for_console<S: Service>(state: &ListenerState, service: &S) {
    while let Ok(job) = state.console.take(None) {
        let started = Instant::now();
        contain_panic(|| serve(state, service, &state.console, job));
        if state.api.load() != (0, 0) {
            thread::sleep((started.elapsed() * CONSOLE_PAUSE).min(LONGEST_PAUSE));
        }
    }
}

/// Takes a request from its first step to its response. After an early return the connection closes.
fn serve(state: &ListenerState, service: &impl Service, queue: &FairQueue, job: Job) {
    let mut running = RunningRequest::new(state, queue, &job);
    let response = match job.work {
        Work::Answer(pending) => {
            if pending.cancellation.is_cancelled() {
                return;
            }
            if let Destination::Console(session) = pending.admission.destination
                && session.is_none_or(|digest| state.credentials.use_lane(&digest).is_none())
                && let Ok(Some(lane)) = service.identify(&pending)
                && let Some(digest) = session
            {
                state.credentials.insert(digest, lane.name.into());
            }
            state.encode(&pending, service.answer(&pending, &running))
        }
        Work::Piece(mut rest, header) => match rest.next() {
            Ok(Some(piece)) => {
                // An empty chunk would end the response.
                let bytes = if piece.is_empty() {
                    piece
                } else {
                    chunk(&piece)
                };
                Outgoing {
                    rest: Some(rest),
                    ..Outgoing::new(bytes, header)
                }
            }
            Ok(None) => Outgoing::new(chunk(b""), header),
            // The connection is closed, so the client sees that this response is incomplete.
            Err(_) => return,
        },
    };
    running.response = Some(response);
}
