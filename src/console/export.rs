//! The rows of a view, to take away. They are made piece by piece as the client takes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::view::View;
use super::visit::Visit;
use super::{Console, Stop, page};
use crate::http::Response;
use crate::http::response::{Broken, Pieces};
use crate::store::{LedgerRow, Store, Which};
use crate::text::csv_line;

/// How many rows are looked at for a piece, and how often before one is given up on: where few match, a thread
/// is not kept for long.
const ROWS: usize = 500;

/// How many exports may be under way: each holds a piece.
const AT_ONCE: usize = 4;

const COLUMNS: [&str; 14] = [
    "request_id",
    "key_id",
    "key_name",
    "created",
    "status",
    "error_code",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "duration_ms",
    "queue_ms",
    "runtime_ms",
    "grounded",
    "seq",
];

#[derive(Default)]
pub struct Exports(Arc<AtomicUsize>);

/// One of the exports that may be under way, until it goes.
struct Permit(Arc<AtomicUsize>);

impl Exports {
    fn permit(&self) -> Result<Permit, Stop> {
        // Counted first, so that two can't both be the last.
        let permit = Permit(Arc::clone(&self.0));
        if permit.0.fetch_add(1, Ordering::AcqRel) < AT_ONCE {
            Ok(permit)
        } else {
            Err(Stop::Wait(Duration::from_secs(10)))
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Csv,
    Json,
}

struct Export {
    store: Arc<Store>,
    which: Which,
    form: Form,
    state: State,
    rows: u64,
    _permit: Permit,
}

enum State {
    /// After this id; from the beginning.
    After(Option<String>),
    Closing,
    Done,
}

pub fn csv(console: &Console, visit: &Visit) -> Result<Response, Stop> {
    let heading = csv_line(&COLUMNS.map(String::from));
    start(console, visit, Form::Csv, "text/csv; charset=utf-8", "csv", heading)
}

pub fn json(console: &Console, visit: &Visit) -> Result<Response, Stop> {
    start(console, visit, Form::Json, "application/json", "json", "[".into())
}

fn start(
    console: &Console,
    visit: &Visit,
    form: Form,
    content_type: &'static str,
    extension: &str,
    opening: String,
) -> Result<Response, Stop> {
    if visit.request.head.tells_keep_alive {
        // HTTP/1.0 has no pieces.
        return Err(Stop::Method);
    }
    let view = View::read(&visit.query, visit.now);
    let (from, to) = view.dates();
    let mut response = page::headers(Response::new(200, content_type, opening.into_bytes())).with(
        "content-disposition",
        format!("attachment; filename=\"adriaticum-usage-{from}-to-{to}.{extension}\""),
    );
    response.rest = Some(Box::new(Export {
        store: Arc::clone(&console.store),
        which: view.which(),
        form,
        state: State::After(None),
        rows: 0,
        _permit: console.exports.permit()?,
    }));
    Ok(response)
}

impl Pieces for Export {
    fn next(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            match &self.state {
                State::After(after) => {
                    let listing =
                        self.store.oldest(&self.which, after.as_deref(), ROWS).map_err(|error| {
                            log::error!("console, export: {error}");
                            Broken
                        })?;
                    let piece: String = listing.rows.iter().map(|row| self.text(row)).collect();
                    self.state = listing.next.map_or(State::Closing, |next| State::After(Some(next)));
                    if !piece.is_empty() {
                        return Ok(Some(piece.into_bytes()));
                    }
                }
                State::Closing => {
                    self.state = State::Done;
                    if self.form == Form::Json {
                        return Ok(Some(b"\n]\n".to_vec()));
                    }
                }
                State::Done => return Ok(None),
            }
        }
    }
}

impl Export {
    fn text(&mut self, row: &LedgerRow) -> String {
        self.rows += 1;
        match self.form {
            Form::Csv => csv_line(&cells(row)),
            Form::Json => {
                let json = serde_json::to_string(row).expect("a row should have its JSON");
                format!("{}\n{json}", if self.rows == 1 { "" } else { "," })
            }
        }
    }
}

/// What is not known is an empty cell.
fn cells(row: &LedgerRow) -> Vec<String> {
    fn shown(value: Option<impl ToString>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    vec![
        row.request_id.clone(),
        row.key_id.clone(),
        row.key_name.clone(),
        row.created.to_string(),
        shown(row.status),
        shown(row.error_code.as_ref()),
        shown(row.tokens.prompt_tokens),
        shown(row.tokens.completion_tokens),
        shown(row.tokens.total_tokens),
        shown(row.duration_ms),
        shown(row.queue_ms),
        shown(row.runtime_ms),
        row.grounded.to_string(),
        shown(row.seq),
    ]
}
