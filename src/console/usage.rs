//! The usage page: figures, charts, and a table of groups; and its export.

use std::collections::HashMap;

use maud::{Markup, html};

use super::chart::{self, Axis, Chart, Series};
use super::filters::{self, Asked, MAX_LINES};
use super::page::{Operator, PageResult};
use crate::error::{Problem, ProblemKind};
use crate::keys::Key;
use crate::ledger::{Grouping, Groups, Span, SpanSums, Sums, UsageRow};
use crate::report::choices;
use crate::report::format::{self, cells, figure, rate};
use crate::report::query::{GROUPS, Query};
use crate::report::rows::{self, FIGURES, csv, tokens};
use crate::store::Store;
use crate::text::{count, grouped};
use crate::when::Range;

/// The columns of the table by key or day, after what names it.
const COLUMNS: &str = "requests,succeeded,prompt_tokens,completion_tokens,total_tokens";

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let mut asked = filters::read(operator, "/usage")?;
    let whole_days = console.store.ledger.with_whole_days(asked.query.range)?;
    let is_extended = whole_days != asked.query.range;
    if is_extended {
        asked.query = asked.query.between(whole_days);
    }
    let content = html! {
        main {
            h1 { "Usage" }
            (asked.filters("/usage"))
            @if asked.unclear.is_none() {
                @if is_extended {
                    p.notice role="status" {
                        "From and To are whole days now: retention has removed the requests of a day that the range cut, and only its sums are kept."
                    }
                }
                (overview(&asked, &UsageReport::read(&console.store, &asked, request.now)?, request.now))
            }
        }
    };
    Ok(operator.page("Usage", &content))
}

fn overview(asked: &Asked, report: &UsageReport, now: i64) -> Markup {
    let Asked { query, keys, .. } = asked;
    html! {
        (range(query, now))
        (cards(query, report))
        @if report.selected.requests == 0 {
            section.empty {
                h2 { "No requests" }
                p {
                    @if keys.is_empty() { "There is no key yet. " a href="/keys/new" { "Create the first key" } " and send a request with it." }
                    @else { "None matches the range and the filters. " a href="/usage?range=all" { "Show all" } }
                }
            }
        } @else {
            @let charts = charts(report, keys);
            (chart::draw(&charts, &report.axis, query))
            (groups(query, report, &charts))
            p.export {
                "Export the totals by key and day: " a href=(query.link("/usage/totals.csv", &[])) { "CSV" }
                ". The rows: see " a href=(query.link("/requests", &[])) { "the requests" } "."
            }
        }
    }
}

fn range(query: &Query, now: i64) -> Markup {
    let (Range { since, until }, zone) = (query.range, &query.zone);
    let time = if since % 60 == 0 && until % 60 == 0 {
        format::minute
    } else {
        format::second
    };
    html! {
        p.muted.range { (time(since, zone)) " to " @if until > now { "now" } @else { (time(until, zone)) } ", " (zone.name()) }
    }
}

fn cards(query: &Query, report: &UsageReport) -> Markup {
    let UsageReport {
        all,
        selected,
        durations,
        ..
    } = report;
    let [prompt, completion, total] = tokens(selected);
    let [median, p95, p99] = [0.5, 0.95, 0.99]
        .map(|share| percentile(durations, share).map_or("–".into(), format::duration));
    let requests = |outcome: &str, text: String| html! { a href=(query.link("/requests", &[("outcome", outcome)])) { (text) } };
    let outcome = query.get("outcome");
    let base = match outcome {
        "" => requests("ok", format!("{} succeeded", grouped(all.succeeded()))),
        _ => requests("", format!("of {}", grouped(all.requests))),
    };
    let failed = if all.requests > 0 {
        requests("failed", count(all.errors, "error"))
    } else {
        html! { "no requests" }
    };
    let parts = html! {
        @if total.is_some() { (figure(prompt)) " in, " (figure(completion)) " out" br; }
        @if selected.unmeasured > 0 { (count(selected.unmeasured, "request")) " unmeasured" }
    };
    let slow = html! {
        @match durations.len() {
            0 if all.succeeded() == 0 => "no completions",
            0 => "none among the newest requests",
            number => {
                "p95 " (p95) ", p99 " (p99) br;
                "of " @if (number as i64) < all.succeeded() { "the newest " } (count(number as i64, "completion"))
            },
        }
    };
    html! {
        dl.cards-row {
            @for (title, figure, detail) in [
                ("Requests", requests(outcome, grouped(selected.requests)), base),
                ("Success rate", html! { (rate(all.succeeded(), all.requests)) }, failed),
                ("Total tokens", html! { (figure(total)) }, parts),
                ("Duration, median", html! { (median) }, slow),
            ] { div { dt { (title) } dd { strong { (figure) } span { (detail) } } } }
        }
    }
}

/// Requests by outcome and, if any were measured, tokens by key.
fn charts(report: &UsageReport, keys: &[Key]) -> Vec<Chart> {
    let outcome = |name: &str, class: &str, kind: ResultKind| {
        let values = report
            .requests
            .iter()
            .map(|kinds| Some(kinds[kind as usize]));
        Series {
            name: name.into(),
            class: class.into(),
            values: values.collect(),
        }
    };
    let selected = &report.selected;
    let (all, succeeded) = (
        count(selected.requests, "request"),
        grouped(selected.succeeded()),
    );
    let mut charts = vec![Chart {
        title: "Requests by outcome",
        summary: format!("Bars: {all}, {succeeded} of them succeeded"),
        series: vec![
            // Errors are few: at the bottom they can be compared.
            outcome("Failed", "failed", ResultKind::Failed),
            outcome("Refused (4xx)", "refused", ResultKind::Refused),
            outcome("Succeeded", "ok", ResultKind::Succeeded),
        ],
    }];
    let series = report.tokens_by_key(keys);
    if !series.is_empty() {
        let missing = match selected.unmeasured {
            0 => String::new(),
            unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
        };
        let tokens = count(selected.total_tokens, "token");
        charts.push(Chart {
            title: "Tokens by key",
            summary: format!("Bars: {tokens}{missing}"),
            series,
        });
    }
    charts
}

/// The table by key, day or outcome, or the figures of the charts.
fn groups(query: &Query, report: &UsageReport, charts: &[Chart]) -> Markup {
    let word = query.get("by");
    let chosen = if word.is_empty() { "key" } else { word };
    let links = GROUPS.into_iter().map(|word| {
        let value = if word == "key" { "" } else { word };
        let address = query.link("/usage", &[("by", value), ("sort", "")]) + "#list";
        (address, word, word == chosen)
    });
    let (columns, default) = match chosen {
        "key" => (format!("name,{COLUMNS},share"), "-total_tokens"),
        "day" => (format!("day,{COLUMNS}"), "-day"),
        _ => ("error_code,requests,requests_share".to_owned(), "-requests"),
    };
    let by = [query.grouping()];
    let table = rows::usage(&report.rows, &by, &report.all, query);
    html! {
        section.groups {
            div.head { h2 { "By " (chosen) } (choices("Groups", links)) }
            @if chosen == "bar" { div #list.data { (chart::figures(charts, &report.axis, query)) } }
            @else { (table.sorted_html("groups", &columns, (chosen, default), query, "/usage")) }
        }
    }
}

/// The totals by key and day, for billing.
pub fn totals(operator: &Operator) -> PageResult {
    let asked = filters::read(operator, "/usage")?;
    let store = &operator.console.store;
    let names = asked
        .keys
        .iter()
        .map(|key| (key.id.clone(), key.name.clone()));
    let names = names.collect();
    let filter = asked.query.row_filter();
    let (range, requests) = (filter.range, filter.requests);
    filters::export(
        operator,
        &asked,
        "totals",
        "usage --by day,key --csv",
        |_| {
            let mut groups = Groups::new(&[Grouping::Day, Grouping::Key], &store.zone);
            store.ledger.figures(Span::Day, range, requests, |row| {
                if groups.count() <= MAX_LINES {
                    groups.add(
                        &row,
                        filter
                            .matching
                            .includes(row.status, row.error_code.as_deref()),
                    );
                }
            })?;
            if groups.count() > MAX_LINES {
                return Ok(None);
            }
            let columns = [&["day", "key_id", "key_name"], &FIGURES[..]].concat();
            let line = |row| cells(&row, ["day", "key_id", "name"].into_iter().chain(FIGURES));
            Ok(Some(csv(
                &columns,
                groups.rows(&names).into_iter().map(line),
            )))
        },
    )
}

/// The number of keys that have a colour of their own in a chart; the others share one.
const KEYS_IN_CHART: usize = 4;

/// The colours of keys in the style sheet, and the shades of each.
const COLOURS: usize = 6;
const SHADES: usize = 3;

/// The outcome of requests, as the charts distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResultKind {
    Succeeded,
    /// The client's fault: 4xx.
    Refused,
    /// The gateway's or the runtime's fault: 5xx; or the client went away.
    Failed,
}

impl ResultKind {
    fn from_status(status: Option<i64>) -> Self {
        match status {
            Some(200) => Self::Succeeded,
            Some(400..=499) => Self::Refused,
            _ => Self::Failed,
        }
    }
}

struct UsageReport {
    /// All requests of the range, the key and the gateway: the base of rates and shares.
    all: Sums,
    /// The requests with the wanted outcome, which also all figures below count.
    selected: Sums,
    axis: Axis,
    /// The number of requests by `ResultKind`, of each bar.
    requests: Vec<[i64; 3]>,
    /// The sums of each key, of each bar.
    keys: HashMap<String, Vec<Sums>>,
    rows: Vec<UsageRow>,
    /// The milliseconds that the newest completions took, in ascending order, whatever the wanted
    /// outcome.
    durations: Vec<f64>,
}

impl UsageReport {
    /// Reads a range, by days if retention has removed the rows of shorter bars.
    fn read(store: &Store, asked: &Asked, now: i64) -> Result<Self, Problem> {
        let axis = |shortest| Axis::new(&asked.query, shortest, now);
        match Self::read_by(axis(Span::Minute), store, asked) {
            Err(problem) if problem.kind == ProblemKind::RowsRemoved => {
                Self::read_by(axis(Span::Day), store, asked)
            }
            report => report,
        }
    }

    fn read_by(axis: Axis, store: &Store, asked: &Asked) -> Result<Self, Problem> {
        let query = &asked.query;
        let (filter, by) = (query.row_filter(), [query.grouping()]);
        let [mut all, mut selected] = [Sums::default(), Sums::default()];
        let bars = axis.bars.len();
        let mut requests = vec![[0; 3]; bars];
        let mut keys: HashMap<String, Vec<Sums>> = HashMap::new();
        let mut groups = Groups::new(&by, &query.zone);
        let take = |row: SpanSums| {
            let is_wanted = filter
                .matching
                .includes(row.status, row.error_code.as_deref());
            all.add(&row.sums);
            groups.add(&row, is_wanted);
            if is_wanted {
                // The range may begin inside a span.
                let start = row.start.max(query.range.since);
                let at = axis.place(start);
                selected.add(&row.sums);
                requests[at][ResultKind::from_status(row.status) as usize] += row.sums.requests;
                let key = keys.entry(row.key_id);
                key.or_insert_with(|| vec![Sums::default(); bars])[at].add(&row.sums);
            }
        };
        let requested = filter.requests.clone();
        store
            .ledger
            .figures(axis.span(), query.range, requested, take)?;
        let names = asked
            .keys
            .iter()
            .map(|key| (key.id.clone(), key.name.clone()));
        Ok(Self {
            all,
            selected,
            axis,
            requests,
            rows: groups.rows(&names.collect()),
            durations: store.ledger.newest_durations(&filter)?,
            keys,
        })
    }

    /// The tokens by bar of the few keys that have most, and of all others together: their names
    /// and colours.
    fn tokens_by_key(&self, known: &[Key]) -> Vec<Series> {
        let places = known.iter().enumerate();
        let places: HashMap<&str, usize> = places
            .map(|(place, key)| (key.id.as_str(), place))
            .collect();
        let place = |id: &str| places.get(id).copied().unwrap_or(known.len());
        let tokens = |bars: &[Sums]| bars.iter().map(|sums| sums.total_tokens).sum::<i64>();
        let mut keys: Vec<(i64, usize, &String)> = self
            .keys
            .iter()
            .map(|(id, bars)| (-tokens(bars), place(id), id))
            .collect();
        keys.retain(|(tokens, ..)| *tokens < 0);
        keys.sort_unstable();
        let series = |name: String, class: String, ids: &[&String]| {
            let value = |bar: usize| {
                let mut sums = Sums::default();
                ids.iter().for_each(|id| sums.add(&self.keys[*id][bar]));
                sums.measured()
            };
            Series {
                name,
                class,
                values: (0..self.axis.bars.len()).map(value).collect(),
            }
        };
        let (mut most, mut others) = (Vec::<Series>::new(), Vec::new());
        for (_, place, id) in keys {
            let class = colour(place);
            if most.len() < KEYS_IN_CHART && most.iter().all(|other| other.class != class) {
                let name = known.get(place).map_or(id, |key| &key.name);
                most.push(series(name.clone(), class, &[id]));
            } else {
                others.push(id);
            }
        }
        if !others.is_empty() {
            let name = count(others.len() as i64, "other");
            most.push(series(name, "others".into(), &others));
        }
        most
    }
}

/// The style sheet's classes for the colour of a key. It follows from the key's position among all
/// keys alone, so that it is the same on every page. Of two keys with the same colour, a chart has
/// the one with more tokens.
fn colour(place: usize) -> String {
    format!("k{} s{}", place % COLOURS, place / COLOURS % SHADES)
}

/// The time that a share of durations in ascending order, from 0 to 1, did not exceed; `None` if
/// there are none.
fn percentile(durations: &[f64], share: f64) -> Option<f64> {
    let number = (durations.len() as f64 * share).ceil() as usize;
    durations.get(number.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact() {
        let durations: Vec<f64> = (1..=500).map(f64::from).collect();
        for (count, expected) in [
            (1, [1.0, 1.0, 1.0]),
            (2, [1.0, 2.0, 2.0]),
            (100, [50.0, 95.0, 99.0]),
            (500, [250.0, 475.0, 495.0]),
        ] {
            assert_eq!(
                [0.5, 0.95, 0.99].map(|share| percentile(&durations[..count], share)),
                expected.map(Some)
            );
        }
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn a_key_keeps_its_colour_whatever_its_rank() {
        let looks: Vec<String> = (0..20).map(colour).collect();
        assert_eq!(
            looks.iter().collect::<std::collections::HashSet<_>>().len(),
            COLOURS * SHADES
        );
        assert_eq!(
            [0, 5, 6, 17, 18].map(colour),
            ["k0 s0", "k5 s0", "k0 s1", "k5 s2", "k0 s0"]
        );
    }
}
