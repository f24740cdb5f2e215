//! The charts of the usage page, and the labels of their bars.

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::bar_interval::BarInterval;
use super::chart::{AxisBar, Chart, Series};
use super::report::{ResultKind, UsageReport, span};
use super::view::UsageView;
use crate::ledger::Span;
use crate::text::{count, grouped};
use crate::when::{DAY, HOUR, Range};

type Format = &'static [BorrowedFormatItem<'static>];

const CLOCK_FORMAT: Format = format_description!("[hour]:[minute]");
const SECOND_FORMAT: Format = format_description!("[hour]:[minute]:[second]");
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
        let values = report
            .bars
            .iter()
            .map(|bar| Some(bar.requests[kind as usize]));
        Series {
            name: name.into(),
            class: class.into(),
            values: values.collect(),
        }
    };
    let (all, succeeded) = (
        count(report.selected.requests, "request"),
        grouped(report.selected.succeeded()),
    );
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
    let missing = match report.selected.unmeasured {
        0 => String::new(),
        unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
    };
    (!series.is_empty()).then(|| Chart {
        title: "Tokens by key",
        summary: format!(
            "Bars: {}{missing}",
            count(report.selected.total_tokens, "token")
        ),
        series,
    })
}

/// The most labels under a chart.
const LABELS: usize = 7;

pub fn axis(view: &UsageView, report: &UsageReport, now: i64) -> Vec<AxisBar> {
    let step = report.step;
    let ranges: Vec<Range> = report.bars.iter().map(|bar| bar.range).collect();
    let bar = |(index, range): (usize, &Range)| {
        let is_present = (range.since..range.until).contains(&now);
        AxisBar {
            label: label(step, *range) + if is_present { ", so far" } else { "" },
            tick: tick(step, &ranges, index).unwrap_or_default(),
            link: address(view, *range, now),
            is_pale: is_present || !step.is_whole(*range),
        }
    };
    ranges.iter().enumerate().map(bar).collect()
}

/// The page with the interval of a bar: its figures by shorter bars, or its requests if there are
/// none.
fn address(view: &UsageView, bar: Range, now: i64) -> String {
    let is_divided = match span(view.range, now) {
        Span::Minute => false,
        Span::Hour => bar.until - bar.since > HOUR || span(bar, now) == Span::Minute,
        Span::Day => true,
    };
    view.between(bar)
        .address(if is_divided { "/usage" } else { "/requests" })
}

/// The interval that a bar covers, in words.
fn label(step: BarInterval, bar: Range) -> String {
    match step {
        BarInterval::Month if step.is_whole(bar) => return formatted(bar.since, MONTH_FORMAT),
        BarInterval::Year if step.is_whole(bar) => return formatted(bar.since, YEAR_FORMAT),
        _ => {}
    }
    let is_multiple = |unit: i64| bar.since % unit == 0 && bar.until % unit == 0;
    let ends = |format| [bar.since, bar.until - 1].map(|time| formatted(time, format));
    let clock_format = if is_multiple(60) {
        CLOCK_FORMAT
    } else {
        SECOND_FORMAT
    };
    let [from, to] = [bar.since, bar.until].map(|time| formatted(time, clock_format));
    let ([first, last], [first_month, last_month]) = (ends(DAY_FORMAT), ends(MONTH_FORMAT));
    let text = match (is_multiple(DAY), first == last) {
        (true, true) => first,
        (true, false) if first_month == last_month => {
            format!("{first}–{}", last.split(' ').next_back().unwrap_or(&last))
        }
        (true, false) => format!("{first} – {last}"),
        (false, true) => format!("{first} {from}–{to}"),
        (false, false) => format!("{first} {from} – {last} {to}"),
    };
    // Long ranges have the same days in several years.
    match step {
        BarInterval::Month | BarInterval::Year => {
            format!("{text}, {}", formatted(bar.since, YEAR_FORMAT))
        }
        _ => text,
    }
}

/// The text under a bar: at whole steps of the clock or the calendar, or under every second, fifth
/// or so. `None` for most bars.
fn tick(step: BarInterval, ranges: &[Range], bar: usize) -> Option<String> {
    let (start, bars) = (ranges[bar].since, ranges.len());
    let is_one_day = ranges[bars - 1].until - ranges[0].since <= DAY;
    let smallest = |steps: &[usize]| {
        steps
            .iter()
            .copied()
            .find(|step| bars.div_ceil(*step) <= LABELS)
            .unwrap_or(bars)
    };
    let (format, is_labelled) = match step {
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
            let month =
                OffsetDateTime::from_unix_timestamp(start).map_or(1, |time| u8::from(time.month()));
            let format = if step == 12 {
                YEAR_FORMAT
            } else {
                MONTH_FORMAT
            };
            (format, (usize::from(month) - 1) % step == 0)
        }
        BarInterval::Year => (YEAR_FORMAT, bar.is_multiple_of(smallest(&[1, 2, 5, 10]))),
    };
    is_labelled.then(|| formatted(start, format))
}

fn formatted(unix: i64, format: Format) -> String {
    let time = OffsetDateTime::from_unix_timestamp(unix).ok();
    time.and_then(|time| time.format(format).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::usage::report::Bar;
    use crate::console::usage::view::tests::{NOW, view};
    use crate::ledger::Sums;

    fn axis_of(query: &str) -> Vec<AxisBar> {
        let view = view(query);
        let (step, ranges) = BarInterval::fitting(view.range, span(view.range, NOW));
        let bars = ranges
            .into_iter()
            .map(|range| Bar {
                range,
                requests: [0; 3],
            })
            .collect();
        let [all, selected] = [Sums::default(), Sums::default()];
        let (errors, keys, durations) = Default::default();
        axis(
            &view,
            &UsageReport {
                all,
                selected,
                step,
                bars,
                errors,
                keys,
                durations,
            },
            NOW,
        )
    }

    #[test]
    fn labels_are_at_the_bars_they_name_and_in_whole_steps() {
        for (query, labels, second) in [
            (
                "range=1h",
                "11:10 11:20 11:30 11:40 11:50 12:00",
                "Jan 15 11:04–11:05",
            ),
            (
                "range=24h",
                "16:00 20:00 00:00 04:00 08:00 12:00",
                "Jan 14 13:00–14:00",
            ),
            (
                "range=7d",
                "Jan 9|Jan 10|Jan 11|Jan 12|Jan 13|Jan 14|Jan 15",
                "Jan 9 06:00–12:00",
            ),
            (
                "range=30d",
                "Dec 17|Dec 22|Dec 27|Jan 1|Jan 6|Jan 11",
                "Dec 18",
            ),
            (
                "range=last-month",
                "Dec 1|Dec 6|Dec 11|Dec 16|Dec 21|Dec 26|Dec 31",
                "Dec 2",
            ),
            (
                "range=90d",
                "Oct 18|Oct 27|Nov 10|Nov 24|Dec 8|Dec 22|Jan 5",
                "Oct 20–26",
            ),
            (
                "from=2025-01-01&to=2025-12-31",
                "Jan 2025|Mar 2025|May 2025|Jul 2025|Sep 2025|Nov 2025",
                "Feb 2025",
            ),
            (
                "from=2020-01-16&to=2026-01-15",
                "2020 2021 2022 2023 2024 2025 2026",
                "Feb 2020",
            ),
            (
                "from=1996-01-01&to=2026-01-01",
                "1996 2001 2006 2011 2016 2021 2026",
                "1997",
            ),
        ] {
            let axis = axis_of(query);
            let ticks: Vec<&str> = axis
                .iter()
                .map(|bar| bar.tick.as_str())
                .filter(|tick| !tick.is_empty())
                .collect();
            let labels: Vec<&str> = labels
                .split(if labels.contains('|') { '|' } else { ' ' })
                .collect();
            assert_eq!(ticks, labels, "{query}");
            assert_eq!(axis[1].label, second, "{query}");
            for AxisBar { tick, label, .. } in &axis {
                assert!(
                    tick.split(' ').all(|word| label.contains(word)),
                    "{query}: {tick} is under {label}"
                );
            }
        }
    }

    #[test]
    fn a_bar_that_the_range_cuts_is_pale_and_labelled_with_what_it_covers() {
        for (query, bars, first, last) in [
            ("range=1h", 60, None, "Jan 15 12:02–12:03, so far"),
            (
                "range=24h",
                25,
                Some("Jan 14 12:03–13:00"),
                "Jan 15 12:00–12:03, so far",
            ),
            ("range=30d", 30, None, "Jan 15, so far"),
            ("range=90d", 14, Some("Oct 18–19"), "Jan 12–15, so far"),
            (
                "from=2025-01-20&to=2025-12-05",
                12,
                Some("Jan 20–31, 2025"),
                "Dec 1–5, 2025",
            ),
            (
                "from=2025-12-16T13:30&to=2026-01-05",
                21,
                Some("Dec 16 13:30–00:00"),
                "",
            ),
            (
                "from=2026-01-08T13:30&to=2026-01-13T07:00",
                20,
                Some("Jan 8 13:30–18:00"),
                "Jan 13 06:00–07:00",
            ),
            (
                "from=2026-01-01T13:30:07&to=2026-01-01T13:30:09",
                1,
                Some("Jan 1 13:30:07–13:30:09"),
                "Jan 1 13:30:07–13:30:09",
            ),
            (
                "from=1996-03-05T12:00&to=2025-12-31",
                30,
                Some("Mar 5 12:00 – Dec 31 00:00, 1996"),
                "",
            ),
        ] {
            let axis = axis_of(query);
            assert_eq!(axis.len(), bars, "{query}");
            let pale: Vec<&str> = axis
                .iter()
                .filter(|bar| bar.is_pale)
                .map(|bar| bar.label.as_str())
                .collect();
            let mut expected: Vec<&str> = first
                .into_iter()
                .chain(Some(last).filter(|last| !last.is_empty()))
                .collect();
            expected.dedup();
            assert_eq!(pale, expected, "{query}");
        }
    }

    #[test]
    fn bars_are_few_and_cover_the_range() {
        for (query, bars, step) in [
            ("range=1h", 60, BarInterval::Seconds(60)),
            ("range=24h", 25, BarInterval::Seconds(HOUR)),
            ("range=7d", 28, BarInterval::Seconds(6 * HOUR)),
            ("range=30d", 30, BarInterval::DAY),
            ("range=90d", 14, BarInterval::Week),
            ("range=month", 15, BarInterval::DAY),
            ("range=last-month", 31, BarInterval::DAY),
            (
                "from=2026-01-15&to=2026-01-15",
                24,
                BarInterval::Seconds(HOUR),
            ),
            (
                "from=2024-01-01&to=2024-01-01",
                24,
                BarInterval::Seconds(HOUR),
            ),
            (
                "from=2026-01-13T13:30&to=2026-01-15T12:00",
                47,
                BarInterval::Seconds(HOUR),
            ),
            (
                "from=2026-01-15T11:10&to=2026-01-15T11:20",
                10,
                BarInterval::Seconds(60),
            ),
            (
                "from=2026-01-15T10:05&to=2026-01-15T12:00",
                58,
                BarInterval::Seconds(120),
            ),
            ("from=2025-01-01&to=2025-12-31", 12, BarInterval::Month),
            ("from=2020-01-16&to=2026-01-15", 73, BarInterval::Month),
            ("from=1996-01-01&to=2026-01-01", 31, BarInterval::Year),
        ] {
            let range = view(query).range;
            let (found, ranges) = BarInterval::fitting(range, span(range, NOW));
            assert_eq!((ranges.len(), found), (bars, step), "{query}");
            assert_eq!(
                (ranges[0].since, ranges[bars - 1].until),
                (range.since, range.until),
                "{query}"
            );
            for pair in ranges.windows(2) {
                assert_eq!(pair[0].until, pair[1].since, "{query}");
                assert_eq!(
                    pair[1].since % span(range, NOW).seconds(),
                    0,
                    "{query}: a sum belongs to one bar"
                );
            }
            assert!(
                ranges[1..bars - 1].iter().all(|bar| step.is_whole(*bar)),
                "{query}"
            );
        }
    }
}
