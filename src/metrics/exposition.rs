//! Prometheus's text format: families of samples, each with its help and type. No name, text or
//! label comes from outside, and of the labels only the name of a key has characters that its
//! writer has to escape.

use std::fmt::Display;

use super::histogram::{BOUNDS, Histogram};

#[derive(Default)]
pub struct MetricsText {
    pub text: String,
    /// The family whose samples come next.
    family: String,
}

impl MetricsText {
    pub fn family(&mut self, kind: &str, name: &str, help: &str) -> &mut Self {
        self.text += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        self.family = name.to_owned();
        self
    }

    pub fn counter(&mut self, name: &str, help: &str) -> &mut Self {
        self.family("counter", name, help)
    }

    /// Writes a sample. Labels are written as in `kind="prompt"`.
    pub fn with(&mut self, labels: &str, value: impl Display) -> &mut Self {
        self.sample("", labels, value)
    }

    pub fn observed(&mut self, labels: &str, histogram: &Histogram) -> &mut Self {
        let (counts, sum) = histogram.read();
        let separator = if labels.is_empty() { "" } else { "," };
        let bounds = BOUNDS
            .iter()
            .map(ToString::to_string)
            .chain(["+Inf".into()]);
        for (bound, count) in bounds.zip(counts) {
            self.sample(
                "_bucket",
                &format!("{labels}{separator}le=\"{bound}\""),
                count,
            );
        }
        let [.., count] = counts;
        self.sample("_sum", labels, sum)
            .sample("_count", labels, count)
    }

    fn sample(&mut self, suffix: &str, labels: &str, value: impl Display) -> &mut Self {
        let labels = if labels.is_empty() {
            String::new()
        } else {
            format!("{{{labels}}}")
        };
        self.text += &format!("{}{suffix}{labels} {value}\n", self.family);
        self
    }
}
