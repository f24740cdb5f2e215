//! Prometheus's text format: families of samples, each with its help and type. No name, text or label
//! comes from outside, so nothing is escaped.

use std::fmt::Display;

use super::histogram::Histogram;

#[derive(Default)]
pub struct MetricsText(pub String);

/// A family whose samples come next. Labels are written as in `kind="prompt"`.
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl MetricsText {
    pub fn family<'a>(&'a mut self, kind: &str, name: &'a str, help: &str) -> Family<'a> {
        self.0 += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        Family { text: &mut self.0, name }
    }

    pub fn counter<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family("counter", name, help)
    }
}

impl Family<'_> {
    pub fn with(&mut self, labels: &str, value: impl Display) -> &mut Self {
        self.sample("", labels, value)
    }

    pub fn observed(&mut self, labels: &str, histogram: &Histogram) -> &mut Self {
        let observed = histogram.read();
        let separator = if labels.is_empty() { "" } else { "," };
        let bounds = observed.buckets.iter().map(|(bound, count)| (bound.to_string(), *count));
        for (bound, count) in bounds.chain([("+Inf".into(), observed.count)]) {
            self.sample("_bucket", &format!("{labels}{separator}le=\"{bound}\""), count);
        }
        self.sample("_sum", labels, observed.sum).sample("_count", labels, observed.count)
    }

    fn sample(&mut self, suffix: &str, labels: &str, value: impl Display) -> &mut Self {
        let name = self.name;
        *self.text += &match labels {
            "" => format!("{name}{suffix} {value}\n"),
            labels => format!("{name}{suffix}{{{labels}}} {value}\n"),
        };
        self
    }
}
