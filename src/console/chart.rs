//! Charts, drawn here as SVG. They stretch to any width: what must not be stretched, the texts, stands beside them.

use maud::{Markup, html};

/// The drawing's own units.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 200.0;

/// How long a value without neighbours is drawn.
const DOT: f64 = 14.0;

/// The share of its place that a bar fills.
const FILLED: f64 = 0.78;

/// Some values over time, in the order of the bars.
pub struct Series {
    pub name: String,
    /// Its colour, by the style sheet's class.
    pub class: String,
    pub values: Vec<Option<f64>>,
}

pub struct Chart<'a> {
    pub title: &'a str,
    /// The description for screen readers.
    pub summary: String,
    pub series: Vec<Series>,
    /// What each bar is of, in full, and what stands under the first of each quarter.
    pub labels: Vec<String>,
    pub ticks: Vec<String>,
    /// The format of a value in a title and in the table, and at the axis.
    pub told: fn(f64) -> String,
    pub axis: fn(f64) -> String,
}

impl Chart<'_> {
    /// Values that add up, as bars on one another.
    pub fn bars(&self) -> Markup {
        let sums = (0..self.labels.len())
            .map(|bar| self.series.iter().filter_map(|series| series.values[bar]).sum())
            .fold(0.0, f64::max);
        let scale = Scale::to(sums);
        let place = WIDTH / self.labels.len() as f64;
        let mut below = vec![0.0; self.labels.len()];
        let paths: Vec<String> = self
            .series
            .iter()
            .map(|series| {
                let mut path = String::new();
                for (bar, value) in series.values.iter().enumerate() {
                    let Some(value) = value.filter(|value| *value > 0.0) else {
                        continue;
                    };
                    // Whatever is there at all can be seen.
                    let high = (value / scale.top * HEIGHT).max(1.5);
                    let (x, y) = (bar as f64 * place + place * (1.0 - FILLED) / 2.0, HEIGHT - below[bar]);
                    let wide = place * FILLED;
                    path += &format!("M{x:.1} {y:.1}v-{high:.1}h{wide:.1}v{high:.1}z");
                    below[bar] += high;
                }
                path
            })
            .collect();
        let drawn = html! {
            @for (series, path) in self.series.iter().zip(&paths) {
                @if !path.is_empty() { path class=(format!("f {}", series.class)) d=(path) {} }
            }
        };
        self.figure(&scale, &drawn, true)
    }

    /// Values that stand for themselves, as lines. A value without neighbours is a dash.
    pub fn lines(&self) -> Markup {
        let most =
            self.series.iter().flat_map(|series| series.values.iter().flatten()).copied().fold(0.0, f64::max);
        let scale = Scale::to(most);
        let place = WIDTH / self.labels.len() as f64;
        let drawn = html! {
            @for series in &self.series {
                path class=(format!("l {}", series.class)) d=(line(&series.values, place, scale.top)) {}
            }
        };
        self.figure(&scale, &drawn, false)
    }

    fn figure(&self, scale: &Scale, drawn: &Markup, adds_up: bool) -> Markup {
        let place = WIDTH / self.labels.len() as f64;
        html! {
            figure.chart {
                figcaption { h2 { (self.title) } }
                ul.legend {
                    @for series in &self.series { li { span class=(format!("swatch {}", series.class)) {} span.text { (series.name) } } }
                }
                div.plot {
                    div.y aria-hidden="true" {
                        @for step in (0..=scale.steps).rev() { span { ((self.axis)(scale.top * step as f64 / scale.steps as f64)) } }
                    }
                    svg viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) preserveAspectRatio="none" role="img" aria-label=(self.summary) {
                        @for step in 0..=scale.steps {
                            @let y = HEIGHT * step as f64 / scale.steps as f64;
                            path.grid d=(format!("M0 {y:.1}h{WIDTH}")) {}
                        }
                        (drawn)
                        g.h {
                            @for (bar, label) in self.labels.iter().enumerate() {
                                rect x=(format!("{:.0}", bar as f64 * place)) width=(format!("{place:.0}")) height=(HEIGHT) {
                                    title { (self.told_of(bar, label, adds_up)) }
                                }
                            }
                        }
                    }
                    div.x aria-hidden="true" { @for tick in &self.ticks { span { (tick) } } }
                }
                (self.table())
            }
        }
    }

    /// The tooltip of a bar. Of many series it has the sum, or the page would
    /// weigh too much; the table has each.
    fn told_of(&self, bar: usize, label: &str, adds_up: bool) -> String {
        let values = || self.series.iter().filter_map(|series| Some((series, series.values[bar]?)));
        let mut told = label.to_owned();
        if adds_up && self.series.len() > 3 {
            told += &format!("\n{}", (self.told)(values().map(|(_, value)| value).sum()));
        } else {
            for (series, value) in values().filter(|(_, value)| *value > 0.0) {
                told += &format!("\n{}: {}", series.name, (self.told)(value));
            }
        }
        told
    }

    /// The same to be read. A bar without anything has no line.
    fn table(&self) -> Markup {
        let is_known =
            |bar: usize| self.series.iter().any(|series| series.values[bar].is_some_and(|v| v > 0.0));
        let told = |value: Option<f64>| value.map_or("–".into(), self.told);
        html! {
            details.data {
                summary { "As a table" span.unseen { ": " (self.title) } }
                div.scroll tabindex="0" role="region" aria-label=(format!("{}, as a table", self.title)) {
                    table {
                        thead { tr {
                            th scope="col" { "Time (UTC)" }
                            @for series in &self.series { th scope="col" { (series.name) } }
                        } }
                        tbody {
                            @for (bar, label) in self.labels.iter().enumerate().filter(|(bar, _)| is_known(*bar)) {
                                tr {
                                    th { (label) }
                                    @for series in &self.series { td { (told(series.values[bar])) } }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn line(values: &[Option<f64>], place: f64, top: f64) -> String {
    let mut path = String::new();
    for (bar, value) in values.iter().enumerate() {
        let Some(value) = value else {
            continue;
        };
        let (x, y) = (bar as f64 * place + place / 2.0, HEIGHT - value / top * HEIGHT);
        let is_first = bar == 0 || values[bar - 1].is_none();
        let is_last = values.get(bar + 1).is_none_or(Option::is_none);
        path += &match (is_first, is_last) {
            (true, true) => format!("M{:.1} {y:.1}h{DOT}", x - DOT / 2.0),
            (true, false) => format!("M{x:.1} {y:.1}"),
            (false, _) => format!("L{x:.1} {y:.1}"),
        };
    }
    path
}

/// An axis from nothing to a round number.
struct Scale {
    top: f64,
    steps: u32,
}

impl Scale {
    /// The smallest round one that `most` fits under: steps of 1, 2 or 5 and zeros, at most five of them.
    fn to(most: f64) -> Self {
        if most <= 0.0 || !most.is_finite() {
            return Self { top: 1.0, steps: 1 };
        }
        // Counts are whole, and times below a millisecond are not worth an axis of their own.
        let mut ten = 10_f64.powf((most / 5.0).log10().floor()).max(1.0);
        loop {
            for step in [1.0, 2.0, 5.0] {
                let steps = (most / (step * ten)).ceil().max(1.0);
                if steps <= 5.0 {
                    return Self { top: steps * step * ten, steps: steps as u32 };
                }
            }
            ten *= 10.0;
        }
    }
}

/// A number at an axis: three figures at most, and a letter.
pub fn short(number: f64) -> String {
    let (value, letter) = match number {
        n if n < 1e3 => (n, ""),
        n if n < 1e6 => (n / 1e3, "k"),
        n if n < 1e9 => (n / 1e6, "M"),
        n if n < 1e12 => (n / 1e9, "G"),
        n => (n / 1e12, "T"),
    };
    let text = format!("{value:.1}");
    format!("{}{letter}", text.strip_suffix(".0").unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!([0.0, 15.0, 1_500.0, 250_000.0, 2e6].map(short), ["0", "15", "1.5k", "250k", "2M"]);
    }

    #[test]
    fn names_are_escaped_wherever_they_stand() {
        let hostile = "</title><script>\"'&";
        let chart = Chart {
            title: "Tokens",
            summary: hostile.into(),
            series: vec![Series { name: hostile.into(), class: "k0".into(), values: vec![Some(1.0), None] }],
            labels: vec![hostile.into(), hostile.into()],
            ticks: vec![hostile.into()],
            told: short,
            axis: short,
        };
        for drawn in [chart.bars(), chart.lines()] {
            let text = drawn.into_string();
            assert!(!text.contains("<script"), "{text}");
            assert!(text.contains("&lt;script&gt;&quot;"), "{text}");
        }
    }
}
