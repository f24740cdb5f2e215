//! The charts of the usage page, and the labels of their bars.

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::bar_interval::{BarInterval, DAY, HOUR};
use super::chart::{Axis, Chart, Series};
use super::usage_report::{ResultKind, UsageReport};
use super::usage_view::UsageView;
use crate::text::{count, grouped};

type Format = &'static [BorrowedFormatItem<'static>];

const CLOCK_FORMAT: Format = format_description!("[hour]:[minute]");
const DAY_FORMAT: Format = format_description!("[month repr:short] [day padding:none]");
const MONTH_FORMAT: Format = format_description!("[month repr:short] [year]");
const YEAR_FORMAT: Format = format_description!("[year]");

pub fn all(report: &UsageReport) -> Vec<Chart> {
    let mut charts = vec![requests(report)];
    charts.extend(tokens(report));
    charts
}

fn requests(report: &UsageReport) -> Chart {
    let series = |name: &str, class: &str, kind: ResultKind| {
        let values = report.bars.iter().map(|bar| bar.requests[kind as usize]);
        Series { name: name.into(), class: class.into(), values: values.collect() }
    };
    let (all, succeeded) = (count(report.all.requests, "request"), grouped(report.all.succeeded()));
    Chart {
        title: "Requests by outcome",
        summary: format!("Bars: {all}, {succeeded} of them succeeded"),
        series: vec![
            // Errors are few: at the bottom they can be compared.
            series("Failed", "failed", ResultKind::Failed),
            series("Refused (4xx)", "refused", ResultKind::Refused),
            series("Succeeded", "ok", ResultKind::Succeeded),
        ],
    }
}

/// Returns `None` if no tokens were measured.
fn tokens(report: &UsageReport) -> Option<Chart> {
    let series = report.tokens_by_key();
    let missing = match report.all.unmeasured {
        0 => String::new(),
        unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
    };
    (!series.is_empty()).then(|| Chart {
        title: "Tokens by key",
        summary: format!("Bars: {}{missing}", count(report.all.total_tokens, "token")),
        series,
    })
}

/// The most labels under a chart.
const LABELS: usize = 7;

pub fn axis(view: &UsageView, now: i64) -> Axis {
    let bars = 0..view.starts.len();
    Axis {
        labels: bars.clone().map(|bar| label(view, bar)).collect(),
        ticks: bars.clone().map(|bar| tick(view, bar).unwrap_or_default()).collect(),
        links: bars.map(|bar| view.bar_address(bar, now)).collect(),
        unfinished: view.bar(now),
    }
}

fn label(view: &UsageView, bar: usize) -> String {
    let (start, end) = (view.starts[bar], view.end(bar));
    let day = formatted(start, DAY_FORMAT);
    match view.step {
        BarInterval::DAY => day,
        BarInterval::Seconds(_) => {
            format!("{day} {}–{}", formatted(start, CLOCK_FORMAT), formatted(end, CLOCK_FORMAT))
        }
        BarInterval::Week => format!("{day} – {}", formatted(end - 1, DAY_FORMAT)),
        BarInterval::Month => formatted(start, MONTH_FORMAT),
        BarInterval::Year => formatted(start, YEAR_FORMAT),
    }
}

/// The text under a bar: at whole steps of the clock or the calendar, or under every second, fifth or so. `None` for most bars.
fn tick(view: &UsageView, bar: usize) -> Option<String> {
    let (start, bars) = (view.starts[bar], view.starts.len());
    let is_one_day = view.range.until - view.range.since <= DAY;
    let smallest =
        |steps: &[usize]| steps.iter().copied().find(|step| bars.div_ceil(*step) <= LABELS).unwrap_or(bars);
    let (format, is_labelled) = match view.step {
        BarInterval::Seconds(seconds) if seconds < HOUR => {
            let step = smallest(&[5, 10, 20]) as i64;
            (CLOCK_FORMAT, start % (step * seconds) == 0)
        }
        BarInterval::Seconds(seconds) if seconds < DAY && is_one_day => {
            (CLOCK_FORMAT, start % (4 * HOUR) == 0)
        }
        BarInterval::Seconds(seconds) if seconds < DAY => (DAY_FORMAT, start % DAY == 0),
        BarInterval::Seconds(_) => (DAY_FORMAT, bar.is_multiple_of(smallest(&[1, 2, 5]))),
        BarInterval::Week => (DAY_FORMAT, bar.is_multiple_of(smallest(&[1, 2, 4, 5]))),
        BarInterval::Month => {
            let step = smallest(&[1, 2, 3, 6, 12]).min(12);
            let month = OffsetDateTime::from_unix_timestamp(start).map_or(1, |time| u8::from(time.month()));
            (if step == 12 { YEAR_FORMAT } else { MONTH_FORMAT }, (usize::from(month) - 1) % step == 0)
        }
        BarInterval::Year => (YEAR_FORMAT, bar.is_multiple_of(smallest(&[1, 2, 5, 10]))),
    };
    is_labelled.then(|| formatted(start, format))
}

fn formatted(unix: i64, format: Format) -> String {
    let time = OffsetDateTime::from_unix_timestamp(unix).ok();
    time.and_then(|time| time.format(format).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::form::Form;

    /// 2026-01-15 12:02:03.
    const NOW: i64 = 1_768_478_523;

    #[test]
    fn labels_are_at_the_bars_they_name_and_in_whole_steps() {
        for (query, labels, second) in [
            ("range=1h", "11:10 11:20 11:30 11:40 11:50 12:00", "Jan 15 11:04–11:05"),
            ("range=24h", "16:00 20:00 00:00 04:00 08:00 12:00", "Jan 14 14:00–15:00"),
            ("range=7d", "Jan 9|Jan 10|Jan 11|Jan 12|Jan 13|Jan 14|Jan 15", "Jan 9 06:00–12:00"),
            ("range=30d", "Dec 17|Dec 22|Dec 27|Jan 1|Jan 6|Jan 11", "Dec 18"),
            ("range=last-month", "Dec 1|Dec 6|Dec 11|Dec 16|Dec 21|Dec 26|Dec 31", "Dec 2"),
            ("range=90d", "Oct 18|Oct 27|Nov 10|Nov 24|Dec 8|Dec 22|Jan 5", "Oct 20 – Oct 26"),
            (
                "from=2025-01-01&to=2025-12-31",
                "Jan 2025|Mar 2025|May 2025|Jul 2025|Sep 2025|Nov 2025",
                "Feb 2025",
            ),
            ("from=2020-01-16&to=2026-01-15", "2020 2021 2022 2023 2024 2025 2026", "Feb 2020"),
            ("from=1996-01-01&to=2026-01-01", "1996 2001 2006 2011 2016 2021 2026", "1997"),
        ] {
            let axis = axis(&UsageView::read(&Form::parse(query), NOW), NOW);
            let ticks: Vec<&str> =
                axis.ticks.iter().map(String::as_str).filter(|tick| !tick.is_empty()).collect();
            let labels: Vec<&str> = labels.split(if labels.contains('|') { '|' } else { ' ' }).collect();
            assert_eq!(ticks, labels, "{query}");
            assert_eq!(axis.labels[1], second, "{query}");
            for (tick, label) in axis.ticks.iter().zip(&axis.labels) {
                assert!(label.contains(tick.as_str()), "{query}: {tick} is under {label}");
            }
        }
    }
}
