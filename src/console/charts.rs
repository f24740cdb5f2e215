//! The charts of the usage page: a function each.

use super::chart::{Chart, Series, Shape, Unit};
use super::figures::{Bar, Figures, ResultKind};
use super::page::count;
use crate::store::Durations;
use crate::text::grouped;

pub fn all(figures: &Figures) -> Vec<Chart> {
    let mut charts = vec![requests(figures)];
    charts.extend(tokens(figures));
    charts.extend([
        times("Runtime", "p50 and p95 of the calls that were answered", figures, ["k1", "k0"], |bar| {
            &bar.runtime
        }),
        times(
            "Gateway overhead",
            "p50 and p95 of the rest of the requests’ time",
            figures,
            ["k3", "k2"],
            |bar| &bar.own,
        ),
    ]);
    charts
}

fn requests(figures: &Figures) -> Chart {
    let of = |name: &str, class: &str, kind: ResultKind| {
        let values = figures.bars.iter().map(|bar| Some(bar.requests[kind as usize] as f64));
        Series { name: name.into(), class: class.into(), values: values.collect() }
    };
    let (all, succeeded) = (count(figures.all.requests, "request"), grouped(figures.all.succeeded()));
    Chart {
        title: "Requests by outcome",
        summary: format!("Bars: {all}, {succeeded} of them succeeded"),
        shape: Shape::Bars,
        unit: Unit::Count,
        series: vec![
            // Errors are few: at the bottom they can be compared.
            of("Failed", "failed", ResultKind::Failed),
            of("Refused (4xx)", "refused", ResultKind::Refused),
            of("Succeeded", "ok", ResultKind::Succeeded),
        ],
    }
}

/// `None` if no tokens were measured.
fn tokens(figures: &Figures) -> Option<Chart> {
    let series = figures.tokens_by_key();
    let missing = match figures.all.unmeasured {
        0 => String::new(),
        unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
    };
    (!series.is_empty()).then(|| Chart {
        title: "Tokens by key",
        summary: format!("Bars: {}{missing}", count(figures.all.total_tokens, "token")),
        shape: Shape::Bars,
        unit: Unit::Count,
        series,
    })
}

fn times(
    title: &'static str,
    summary: &str,
    figures: &Figures,
    classes: [&str; 2],
    of: impl Fn(&Bar) -> &Durations,
) -> Chart {
    let series = |name: &str, class: &str, share: f64| Series {
        name: name.into(),
        class: class.into(),
        values: figures.bars.iter().map(|bar| of(bar).percentile(share)).collect(),
    };
    Chart {
        title,
        summary: format!("Lines: {summary}"),
        shape: Shape::Lines,
        unit: Unit::Milliseconds,
        series: vec![series("p95", classes[0], 0.95), series("p50", classes[1], 0.5)],
    }
}
