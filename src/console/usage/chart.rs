//! Draws charts as SVG that stretches to any width. Texts must not be stretched, so they are HTML
//! beside it. The script makes the tooltip of a bar from the values of each path.

use maud::{Markup, html};

use crate::report::format::figure;
use crate::report::query::Query;

/// The drawing's own units: the width of a bar's place, of which the style sheet fills the most, and
/// the height.
const PLACE: usize = 10;
const HEIGHT: f64 = 1000.0;

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

/// The place of a bar in all charts of a page.
pub struct AxisBar {
    /// The interval, in words.
    pub label: String,
    /// The text under the bar; empty for most.
    pub tick: String,
    /// The interval, as an address has it.
    pub range: String,
    /// The bar covers a part of its interval, or the interval has not ended.
    pub is_pale: bool,
}

impl Chart {
    fn figure(&self, axis: &[AxisBar]) -> Markup {
        let bars = axis.len();
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
                        @for (bar, _) in axis.iter().enumerate().filter(|(_, bar)| bar.is_pale) {
                            rect.pale x=(bar * PLACE) width=(PLACE) height=(HEIGHT) {}
                        }
                    }
                    div.x aria-hidden="true" {
                        @for AxisBar { tick, .. } in axis {
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
pub fn draw(charts: &[Chart], axis: &[AxisBar], address: &str) -> Markup {
    let joined = |text: fn(&AxisBar) -> &str| axis.iter().map(text).collect::<Vec<_>>().join("|");
    html! {
        section.charts aria-label="Charts" data-address=(address) data-ranges=(joined(|bar| &bar.range)) data-labels=(joined(|bar| &bar.label)) {
            @for chart in charts { (chart.figure(axis)) }
        }
    }
}

/// The table of all figures.
pub fn figures(charts: &[Chart], axis: &[AxisBar], query: &Query, address: &str) -> Markup {
    let path = address.split('?').next().unwrap_or_default();
    let link = |bar: &AxisBar| query.link(path, &[("range", &bar.range)]);
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
                    @for (number, bar) in axis.iter().enumerate() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::when::Zone;

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
        let axis = [(hostile, false), ("", true)].map(|(tick, is_pale)| AxisBar {
            label: hostile.into(),
            tick: tick.into(),
            range: hostile.into(),
            is_pale,
        });
        let charts = [chart];
        let query = Query::none(&Zone::utc());
        let table = figures(&charts, &axis, &query, "/usage");
        for drawn in [draw(&charts, &axis, hostile), table] {
            let text = drawn.into_string();
            assert!(!text.contains("<script"), "{text}");
            assert!(text.contains("&lt;script&gt;"), "{text}");
        }
    }
}
