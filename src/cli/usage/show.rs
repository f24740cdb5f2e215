//! `usage show`: one request.

use crate::cli::shared::{open_store, print, print_json};
use crate::cli::text_table;
use crate::config::Config;
use crate::database::{Problem, Result};

pub fn run(id: &str, json: bool, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let row = store.ledger.find_row(id)?.ok_or_else(|| {
        Problem::other(format!(
            "there is no row for {id:?}. A request without a valid key has none, and retention removes old rows."
        ))
    })?;
    if json {
        return print_json(&row);
    }
    let outcome = match (row.status, &row.error_code) {
        (Some(status), Some(code)) => format!("{status} {code}"),
        (Some(status), None) => status.to_string(),
        (None, Some(code)) if code == "abandoned" => {
            format!("{code}: the client left before the answer")
        }
        // An earlier version wrote a row before the runtime was called.
        (None, Some(code)) => format!("{code}: the service ended before the answer"),
        (None, None) => "-".into(),
    };
    let figure =
        |figure: Option<i64>| figure.map_or("not measured".into(), |figure| figure.to_string());
    let time = |time: Option<f64>| match time {
        None => "-".into(),
        Some(time) if time < 1000.0 => format!("{time:.3} ms"),
        Some(time) => format!("{:.3} s", time / 1000.0),
    };
    let search = match (&row.search_reason, row.search_results) {
        (None, _) => "not asked".into(),
        (Some(reason), Some(count)) => {
            format!("asked ({reason}), {count} found, {}", time(row.search_ms))
        }
        (Some(reason), None) => format!("asked ({reason}), unavailable, {}", time(row.search_ms)),
    };
    let mut lines = vec![
        ("request", row.request_id),
        ("key", format!("{} ({})", row.key_id, row.key_name)),
        (
            "created",
            store
                .zone
                .iso(row.created)
                .unwrap_or_else(|| row.created.to_string()),
        ),
        ("outcome", outcome),
        ("cause", row.cause.unwrap_or_else(|| "-".into())),
        ("prompt tokens", figure(row.tokens.prompt_tokens)),
        ("completion tokens", figure(row.tokens.completion_tokens)),
        ("total tokens", figure(row.tokens.total_tokens)),
        ("total time", time(row.duration_ms)),
        ("in the queue", time(row.queue_ms)),
        ("runtime", time(row.runtime_ms)),
        ("grounded", if row.grounded { "yes" } else { "no" }.into()),
        ("search", search),
    ];
    if !row.gateway.is_empty() {
        lines.push(("gateway", row.gateway));
    }
    let lines: Vec<_> = lines
        .into_iter()
        .map(|(name, value)| vec![name.into(), value])
        .collect();
    print(&text_table::lay_out(&lines))
}
