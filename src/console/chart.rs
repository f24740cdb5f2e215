//! Charts: the bars, the interval that each stands for, and its label. They are drawn as SVG that
//! stretches to any width; texts must not be stretched, so they are HTML beside it. The script makes
//! the tooltip of a bar from the values of each path.

use maud::{Markup, html};

use crate::ledger::Span;
use crate::report::format::figure;
use crate::report::query::Query;
use crate::when::{DAY, HOUR, Range, Zone, interval_end};

/// The drawing's own units: the width of a bar's place, of which the style sheet fills the most, and
/// the height.
const PLACE: usize = 10;
const HEIGHT: f64 = 1000.0;

const CLOCK_FORMAT: &str = "%H:%M";
const SECOND_FORMAT: &str = "%H:%M:%S";
const DAY_FORMAT: &str = "%b %-d";
const MONTH_FORMAT: &str = "%b %Y";
const YEAR_FORMAT: &str = "%Y";

/// The most labels under a chart.
const LABELS: usize = 7;

/// Values over time, one for each bar.
pub struct Series {
    pub name: String,
    /// The style sheet's class that gives its colour.
    pub class: String,
    /// `None` for a bar in which nothing was measured.
    pub values: Vec<Option<i64>>,
}

impl Series {
    /// The values for the script; an empty one was not measured.
    fn numbers(&self) -> String {
        let number = |value: &Option<i64>| value.map_or(String::new(), |value| value.to_string());
        self.values.iter().map(number).collect::<Vec<_>>().join(",")
    }
}

pub struct Chart {
    pub title: &'static str,
    /// The description for screen readers.
    pub summary: String,
    pub series: Vec<Series>,
}

impl Chart {
    fn figure(&self, axis: &Axis) -> Markup {
        let bars = axis.bars.len();
        let scale = Scale::to(self.highest(bars));
        let (width, steps) = (bars * PLACE, scale.steps);
        let line_y = |step: u32| HEIGHT * f64::from(step) / f64::from(steps);
        let grid: String = (0..=steps)
            .map(|step| format!("M0 {:.0}h{width}", line_y(step)))
            .collect();
        let mut below = vec![0.0; bars];
        let mut labelled = 0;
        html! {
            figure.chart {
                figcaption { h2 { (self.title) } }
                ul.legend {
                    @for series in &self.series { li { span class=(format!("swatch {}", series.class)) {} span.text { (series.name) } } }
                }
                div.plot {
                    div.y aria-hidden="true" {
                        @for step in (0..=steps).rev() { span { (scale.label(step)) } }
                    }
                    svg viewBox=(format!("0 0 {width} {HEIGHT}")) preserveAspectRatio="none" role="img" aria-label=(self.summary) {
                        path.grid d=(grid) {}
                        @for series in &self.series {
                            path class=(format!("f {}", series.class)) data-values=(series.numbers()) d=(stacked_bars(&series.values, &mut below, scale.top)) {}
                        }
                        @for (bar, _) in axis.bars.iter().enumerate().filter(|(_, bar)| bar.is_pale) {
                            rect.pale x=(bar * PLACE) width=(PLACE) height=(HEIGHT) {}
                        }
                    }
                    div.x aria-hidden="true" {
                        @for Bar { tick, .. } in &axis.bars {
                            // A narrow screen shows every second one.
                            @let is_second = !tick.is_empty() && { labelled += 1; labelled % 2 == 0 };
                            i.second[is_second] { (tick) }
                        }
                    }
                }
            }
        }
    }

    fn highest(&self, bars: usize) -> f64 {
        let sum = |bar: usize| {
            self.series
                .iter()
                .map(|series| series.values[bar].unwrap_or(0) as f64)
                .sum()
        };
        (0..bars).map(sum).fold(0.0, f64::max)
    }
}

/// The charts. The script opens the interval of a bar: its range is added to an address.
pub fn draw(charts: &[Chart], axis: &Axis, query: &Query) -> Markup {
    let joined =
        |text: &dyn Fn(&Bar) -> String| axis.bars.iter().map(text).collect::<Vec<_>>().join("|");
    let (ranges, labels) = (
        joined(&|bar| query.range_field(bar.range)),
        joined(&|bar| bar.label.clone()),
    );
    html! {
        section.charts aria-label="Charts" data-address=(axis.link(query, "")) data-ranges=(ranges) data-labels=(labels) {
            @for chart in charts { (chart.figure(axis)) }
        }
    }
}

/// The table of all figures.
pub fn figures(charts: &[Chart], axis: &Axis, query: &Query) -> Markup {
    let link = |bar: &Bar| axis.link(query, &query.range_field(bar.range));
    html! {
        div.scroll tabindex="0" role="region" aria-label="The figures of the charts" {
            table #figures {
                thead {
                    tr {
                        td {}
                        @for chart in charts { th scope="colgroup" colspan=(chart.series.len()) { (chart.title) } }
                    }
                    tr {
                        th scope="col" { "Time (" (query.zone.name()) ")" }
                        @for series in charts.iter().flat_map(|chart| &chart.series) { th scope="col" { (series.name) } }
                    }
                }
                tbody {
                    @for (number, bar) in axis.bars.iter().enumerate() {
                        tr {
                            th { a href=(link(bar)) { (bar.label) } }
                            @for chart in charts {
                                @for series in &chart.series { td { (figure(series.values[number])) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Draws bars on top of those in `below`, as lines: a page may have hundreds. A bar's height is its
/// exact share of the axis: small values belong at the bottom, where the style sheet adds a hairline.
fn stacked_bars(values: &[Option<i64>], below: &mut [f64], top: f64) -> String {
    let mut path = String::new();
    for (bar, value) in values.iter().enumerate() {
        let Some(value) = value.filter(|value| *value > 0) else {
            continue;
        };
        let (x, bottom) = (bar * PLACE + PLACE / 2, HEIGHT - below[bar]);
        below[bar] += value as f64 / top * HEIGHT;
        path += &format!("M{x} {bottom:.0}V{:.0}", HEIGHT - below[bar]);
    }
    path
}

/// An axis from 0 to a round number.
struct Scale {
    top: f64,
    steps: u32,
}

impl Scale {
    /// Returns the smallest axis that `most` fits under: at most five steps of 1, 2 or 5 times a
    /// power of ten.
    fn to(most: f64) -> Self {
        if most <= 0.0 || !most.is_finite() {
            return Self { top: 1.0, steps: 1 };
        }
        let mut ten = 10_f64.powf((most / 5.0).log10().floor()).max(1.0);
        loop {
            for step in [1.0, 2.0, 5.0] {
                let steps = (most / (step * ten)).ceil().max(1.0);
                if steps <= 5.0 {
                    return Self {
                        top: steps * step * ten,
                        steps: steps as u32,
                    };
                }
            }
            ten *= 10.0;
        }
    }

    /// The text at a step.
    fn label(&self, step: u32) -> String {
        short(self.top * f64::from(step) / f64::from(self.steps))
    }
}

/// A number at an axis: three figures at most, and a letter.
fn short(number: f64) -> String {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (unit, letter) = units
        .into_iter()
        .find(|(unit, _)| number >= *unit)
        .unwrap_or((1.0, ""));
    let text = format!("{:.1}", number / unit);
    format!("{}{letter}", text.strip_suffix(".0").unwrap_or(&text))
}

/// The interval that a bar stands for; days and months are those of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BarInterval {
    Minute,
    /// 3,600 seconds, counted from the start of the day.
    Hour,
    Day,
    Month,
}

impl BarInterval {
    /// Each interval with the most bars that a chart has of it: an hour has its minutes, two days
    /// have their hours even if the clock is set back, and a quarter has its days.
    const ALL: [(Self, usize); 4] = [
        (Self::Minute, 61),
        (Self::Hour, 51),
        (Self::Day, 100),
        (Self::Month, usize::MAX),
    ];

    fn span(self) -> Span {
        match self {
            Self::Minute => Span::Minute,
            Self::Hour => Span::Hour,
            Self::Day | Self::Month => Span::Day,
        }
    }

    /// Returns the shortest interval that is no shorter than the span and needs few enough bars for
    /// the range, with what each bar covers. The range may cut the first and the last.
    fn fitting(range: Range, shortest: Span, zone: &Zone) -> (Self, Vec<Range>) {
        let divide = |(interval, most): (Self, usize)| match interval.span() < shortest {
            true => None,
            false => Some((interval, interval.divide(range, most, zone)?)),
        };
        Self::ALL
            .into_iter()
            .find_map(divide)
            .expect("there may be any number of months")
    }

    /// The start of the next interval after a time.
    fn next(self, time: i64, zone: &Zone) -> i64 {
        match self {
            Self::Minute => interval_end(time, 60),
            Self::Hour => {
                let day = zone.day(time);
                let next = time - (time - day.since) % HOUR + HOUR;
                next.min(day.until)
            }
            Self::Day => zone.day(time).until,
            Self::Month => zone.month(time).until,
        }
    }

    /// Returns true if a bar covers its whole interval.
    fn is_whole(self, bar: Range, zone: &Zone) -> bool {
        [self.next(bar.since - 1, zone), self.next(bar.since, zone)] == [bar.since, bar.until]
    }

    /// Returns what the bars of a range cover, or `None` if they are too many.
    fn divide(self, range: Range, most: usize, zone: &Zone) -> Option<Vec<Range>> {
        let mut bars = Vec::new();
        let mut since = range.since;
        while since < range.until {
            let until = self.next(since, zone).min(range.until);
            bars.push(Range { since, until });
            since = until;
            if bars.len() > most {
                return None;
            }
        }
        Some(bars)
    }
}

/// The bars of all charts of a page.
pub struct Axis {
    step: BarInterval,
    pub bars: Vec<Bar>,
}

pub struct Bar {
    /// What it covers: the range of the page may cut the first and the last.
    range: Range,
    /// The interval, in words.
    label: String,
    /// The text under the bar; empty for most.
    tick: String,
    /// The bar covers a part of its interval, or the interval has not ended.
    is_pale: bool,
}

impl Axis {
    pub fn new(query: &Query, shortest: Span, now: i64) -> Self {
        let zone = &query.zone;
        let (step, ranges) = BarInterval::fitting(query.range, shortest, zone);
        let bar = |(index, range): (usize, &Range)| {
            let is_present = (range.since..range.until).contains(&now);
            Bar {
                range: *range,
                label: label(step, *range, zone) + if is_present { ", so far" } else { "" },
                tick: tick(step, &ranges, index, zone).unwrap_or_default(),
                is_pale: is_present || !step.is_whole(*range, zone),
            }
        };
        let bars = ranges.iter().enumerate().map(bar).collect();
        Self { step, bars }
    }

    /// The spans by which its figures are read.
    pub fn span(&self) -> Span {
        self.step.span()
    }

    /// The number of the bar that a time is in.
    pub fn place(&self, time: i64) -> usize {
        self.bars.partition_point(|bar| bar.range.until <= time)
    }

    /// The address of an interval: its figures by shorter bars, or its requests if there are none.
    fn link(&self, query: &Query, range: &str) -> String {
        let is_divided = self.step != BarInterval::Minute && self.bars.len() > 1;
        let path = if is_divided { "/usage" } else { "/requests" };
        query.link(path, &[("range", range)])
    }
}

/// The interval that a bar covers, in words.
fn label(step: BarInterval, bar: Range, zone: &Zone) -> String {
    if step == BarInterval::Month && step.is_whole(bar, zone) {
        return formatted(bar.since, MONTH_FORMAT, zone);
    }
    let is_whole_days = [bar.since, bar.until]
        .iter()
        .all(|&time| zone.day(time).since == time);
    let ends = |format| [bar.since, bar.until - 1].map(|time| formatted(time, format, zone));
    let [from, to] = [bar.since, bar.until].map(|time| clock(bar, time, zone));
    let ([first, last], [first_month, last_month]) = (ends(DAY_FORMAT), ends(MONTH_FORMAT));
    let text = match (is_whole_days, first == last) {
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
        BarInterval::Month => format!("{text}, {}", formatted(bar.since, YEAR_FORMAT, zone)),
        _ => text,
    }
}

/// The time of day of a bar's bound, with its offset if the day has that time twice.
fn clock(bar: Range, time: i64, zone: &Zone) -> String {
    if bar.since % 60 == 0 && bar.until % 60 == 0 {
        let date_and_clock = zone.format_clock(time);
        date_and_clock
            .split(' ')
            .next_back()
            .unwrap_or_default()
            .to_owned()
    } else {
        formatted(time, SECOND_FORMAT, zone)
    }
}

/// The text under a bar: at whole steps of the clock or the calendar, or under every second, fifth
/// or so. `None` for most bars.
fn tick(step: BarInterval, ranges: &[Range], bar: usize, zone: &Zone) -> Option<String> {
    let (start, bars) = (ranges[bar].since, ranges.len());
    // With an hour that the clock is set back.
    let is_one_day = ranges[bars - 1].until - ranges[0].since <= DAY + HOUR;
    let smallest = |steps: &[usize]| {
        steps
            .iter()
            .copied()
            .find(|step| bars.div_ceil(*step) <= LABELS)
            .unwrap_or(bars)
    };
    let is_multiple = |unit: &str, step: usize| {
        let number = formatted(start, unit, zone).parse::<usize>();
        number.is_ok_and(|number| number % step == 0)
    };
    let (format, is_labelled) = match step {
        BarInterval::Minute => (CLOCK_FORMAT, is_multiple("%M", smallest(&[5, 10, 20]))),
        BarInterval::Hour if is_one_day => {
            let is_cut = (start - zone.day(start).since) % HOUR > 0;
            (CLOCK_FORMAT, !is_cut && is_multiple("%H", 4))
        }
        BarInterval::Hour => (DAY_FORMAT, zone.day(start).since == start),
        BarInterval::Day => (DAY_FORMAT, bar.is_multiple_of(smallest(&[1, 2, 5, 10, 15]))),
        BarInterval::Month => {
            let step = smallest(&[1, 2, 3, 6, 12, 24]);
            let month = zone.date(start);
            let month = month.year() as usize * 12 + month.month() as usize - 1;
            let format = if step >= 12 {
                YEAR_FORMAT
            } else {
                MONTH_FORMAT
            };
            (format, month.is_multiple_of(step))
        }
    };
    is_labelled.then(|| formatted(start, format, zone))
}

fn formatted(unix: i64, format: &str, zone: &Zone) -> String {
    zone.format(unix, format).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::query::tests::{NOW, query};
    use crate::when::tests::zone;

    fn axis_of(text: &str, place: &str) -> Vec<Bar> {
        let query = query("/usage", text, &zone(place));
        Axis::new(&query, Span::Minute, NOW).bars
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
                "from=2026-01-14&to=2026-01-15",
                "Jan 14|Jan 15",
                "Jan 14 01:00–02:00",
            ),
            (
                "range=7d",
                "Jan 9|Jan 10|Jan 11|Jan 12|Jan 13|Jan 14|Jan 15",
                "Jan 10",
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
                "Oct 18|Nov 2|Nov 17|Dec 2|Dec 17|Jan 1",
                "Oct 19",
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
                "from=2016-02-01&to=2026-01-15",
                "2018 2020 2022 2024 2026",
                "Mar 2016",
            ),
        ] {
            let axis = axis_of(query, "UTC");
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
            for Bar { tick, label, .. } in &axis {
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
            ("range=90d", 90, None, "Jan 15, so far"),
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
                "from=2026-01-11T13:30&to=2026-01-13T07:15",
                43,
                Some("Jan 11 13:30–14:00"),
                "Jan 13 07:00–07:15",
            ),
            (
                "from=2026-01-01T13:30:07&to=2026-01-01T13:30:09",
                1,
                Some("Jan 1 13:30:07–13:30:09"),
                "Jan 1 13:30:07–13:30:09",
            ),
            (
                "from=2016-03-05T12:00&to=2025-12-31",
                118,
                Some("Mar 5 12:00 – Mar 31 00:00, 2016"),
                "",
            ),
        ] {
            let axis = axis_of(query, "UTC");
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
            ("range=1h", 60, BarInterval::Minute),
            ("range=24h", 25, BarInterval::Hour),
            ("range=7d", 7, BarInterval::Day),
            ("range=30d", 30, BarInterval::Day),
            ("range=90d", 90, BarInterval::Day),
            ("range=month", 15, BarInterval::Day),
            ("range=last-month", 31, BarInterval::Day),
            ("from=2026-01-15&to=2026-01-15", 24, BarInterval::Hour),
            ("from=2024-01-01&to=2024-01-02", 48, BarInterval::Hour),
            (
                "from=2026-01-13T13:30&to=2026-01-15T12:00",
                47,
                BarInterval::Hour,
            ),
            (
                "from=2026-01-15T11:10&to=2026-01-15T11:20",
                10,
                BarInterval::Minute,
            ),
            (
                "from=2026-01-15T10:05&to=2026-01-15T12:00",
                2,
                BarInterval::Hour,
            ),
            ("from=2025-09-01&to=2025-12-31", 4, BarInterval::Month),
            ("from=2025-01-01&to=2025-12-31", 12, BarInterval::Month),
            ("from=2020-01-16&to=2026-01-15", 73, BarInterval::Month),
        ] {
            check_bars(query, "UTC", bars, step);
        }
        for (query, place, bars, step) in [
            ("range=24h", "Asia/Kolkata", 25, BarInterval::Hour),
            (
                "from=2025-10-26&to=2025-10-26",
                "Europe/Zagreb",
                25,
                BarInterval::Hour,
            ),
            (
                "from=2025-03-30&to=2025-03-31",
                "Europe/Zagreb",
                47,
                BarInterval::Hour,
            ),
            (
                "from=2025-04-06&to=2025-04-06",
                "Australia/Lord_Howe",
                25,
                BarInterval::Hour,
            ),
            (
                "from=2025-03-09&to=2025-03-09",
                "America/Havana",
                23,
                BarInterval::Hour,
            ),
            (
                "from=2025-10-01&to=2025-12-31",
                "America/Los_Angeles",
                92,
                BarInterval::Day,
            ),
            (
                "range=last-month",
                "America/Los_Angeles",
                31,
                BarInterval::Day,
            ),
            (
                "from=2025-01-01&to=2025-12-31",
                "Europe/Zagreb",
                12,
                BarInterval::Month,
            ),
        ] {
            check_bars(query, place, bars, step);
        }
    }

    #[track_caller]
    fn check_bars(text: &str, place: &str, bars: usize, step: BarInterval) {
        let zone = zone(place);
        let range = query("/usage", text, &zone).range;
        let (found, ranges) = BarInterval::fitting(range, Span::Minute, &zone);
        let context = format!("{text} {place}");
        assert_eq!((ranges.len(), found), (bars, step), "{context}");
        let ends = (ranges[0].since, ranges[bars - 1].until);
        assert_eq!(ends, (range.since, range.until), "{context}");
        for pair in ranges.windows(2) {
            assert_eq!(pair[0].until, pair[1].since, "{context}");
        }
        let inner = ranges.get(1..bars - 1).unwrap_or_default();
        assert!(
            inner.iter().all(|bar| step.is_whole(*bar, &zone)),
            "{context}"
        );
        if step != BarInterval::Day {
            let (by_days, _) = BarInterval::fitting(range, Span::Day, &zone);
            assert!(by_days.span() == Span::Day, "{context}");
        }
    }

    #[test]
    fn an_hour_that_a_day_has_twice_is_labelled_with_its_offset() {
        let axis = axis_of("from=2025-10-26&to=2025-10-26", "Europe/Zagreb");
        let labels: Vec<&str> = axis[1..5].iter().map(|bar| bar.label.as_str()).collect();
        assert_eq!(
            labels,
            [
                "Oct 26 01:00–02:00+02:00",
                "Oct 26 02:00+02:00–02:00+01:00",
                "Oct 26 02:00+01:00–03:00",
                "Oct 26 03:00–04:00",
            ]
        );
        let ticks = axis.iter().map(|bar| bar.tick.as_str());
        let ticks: Vec<&str> = ticks.filter(|tick| !tick.is_empty()).collect();
        assert_eq!(
            ticks,
            ["00:00", "04:00", "08:00", "12:00", "16:00", "20:00"]
        );
        let axis = axis_of("from=2025-03-09&to=2025-03-09", "America/Havana");
        assert_eq!(axis[0].label, "Mar 9 01:00–02:00", "a day without midnight");
    }

    #[test]
    fn an_axis_for_one_and_for_a_million() {
        for (most, top, steps) in [
            (0.0, 1.0, 1),
            (0.3, 1.0, 1),
            (1.0, 1.0, 1),
            (3.0, 3.0, 3),
            (7.0, 8.0, 4),
            (12.0, 15.0, 3),
            (101.0, 150.0, 3),
            (1_000_000.0, 1_000_000.0, 5),
            (1_234_567.0, 1_500_000.0, 3),
        ] {
            let scale = Scale::to(most);
            assert_eq!((scale.top, scale.steps), (top, steps), "{most}");
        }
        for most in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(Scale::to(most).steps, 1);
        }
        assert_eq!(
            [0.0, 15.0, 1_500.0, 250_000.0, 2e6].map(short),
            ["0", "15", "1.5k", "250k", "2M"]
        );
    }

    #[test]
    fn names_are_escaped_wherever_they_stand() {
        let hostile = "</title><script>\"'&";
        let chart = Chart {
            title: "Tokens",
            summary: hostile.into(),
            series: vec![Series {
                name: hostile.into(),
                class: "k0".into(),
                values: vec![Some(1), None],
            }],
        };
        let text = "range=2026-01-13..2026-01-14&gateway=</title><script>";
        let query = query("/usage", text, &Zone::utc());
        let axis = Axis::new(&query, Span::Day, NOW);
        assert_eq!(axis.bars.len(), 2);
        let charts = [chart];
        let table = figures(&charts, &axis, &query);
        for drawn in [draw(&charts, &axis, &query), table] {
            let text = drawn.into_string();
            assert!(!text.contains("<script"), "{text}");
            assert!(text.contains("&lt;script&gt;"), "{text}");
        }
    }
}
