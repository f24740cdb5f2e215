//! Prometheus's text format: families of samples, each with what it means and what kind it is.

use std::fmt::{self, Display, Write};

use super::histogram::Histogram;

#[derive(Default)]
pub struct Text(String);

/// A family whose samples come next.
pub struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
}

type Labels<'a> = &'a [(&'a str, &'a str)];

impl Text {
    pub fn counter(&mut self, name: &'static str, help: &str) -> Family<'_> {
        self.family(name, "counter", help)
    }

    pub fn gauge(&mut self, name: &'static str, help: &str) -> Family<'_> {
        self.family(name, "gauge", help)
    }

    pub fn histogram(&mut self, name: &'static str, help: &str) -> Family<'_> {
        self.family(name, "histogram", help)
    }

    fn family(&mut self, name: &'static str, kind: &str, help: &str) -> Family<'_> {
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        put(&mut self.0, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        Family { text: &mut self.0, name }
    }
}

impl From<Text> for String {
    fn from(text: Text) -> Self {
        text.0
    }
}

impl Family<'_> {
    pub fn with(&mut self, labels: Labels, value: impl Display) -> &mut Self {
        self.sample("", labels, None, value)
    }

    pub fn observed(&mut self, labels: Labels, histogram: &Histogram) -> &mut Self {
        let observed = histogram.read();
        for (bound, count) in observed.buckets {
            self.sample("_bucket", labels, Some(bound), count);
        }
        self.sample("_bucket", labels, Some(f64::INFINITY), observed.count)
            .sample("_sum", labels, None, observed.sum)
            .sample("_count", labels, None, observed.count)
    }

    /// One line: a bucket has its bound as the last of its labels.
    fn sample(&mut self, suffix: &str, labels: Labels, bound: Option<f64>, value: impl Display) -> &mut Self {
        put(self.text, format_args!("{}{suffix}", self.name));
        let bound = bound.map(|bound| match bound {
            f64::INFINITY => "+Inf".into(),
            bound => bound.to_string(),
        });
        let mut before = '{';
        for (name, value) in labels.iter().copied().chain(bound.as_deref().map(|bound| ("le", bound))) {
            put(self.text, format_args!("{before}{name}=\"{}\"", escaped(value)));
            before = ',';
        }
        if before == ',' {
            self.text.push('}');
        }
        put(self.text, format_args!(" {value}\n"));
        self
    }
}

/// A label's value as it stands between quotation marks.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

fn put(text: &mut String, what: fmt::Arguments) {
    text.write_fmt(what).expect("a String should take all that is written");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_could_end_a_value_or_a_line_is_escaped() {
        let mut text = Text::default();
        text.gauge("g", "one\\two\nthree \"four\"").with(&[("a", "x\"y\\z\n"), ("b", "")], 1.5).with(&[], 2);
        let expected = "# HELP g one\\\\two\\nthree \"four\"\n# TYPE g gauge\n\
                        g{a=\"x\\\"y\\\\z\\n\",b=\"\"} 1.5\ng 2\n";
        assert_eq!(String::from(text), expected);
    }

    #[test]
    fn a_histogram_has_its_buckets_its_sum_and_its_count() {
        let histogram = Histogram::default();
        histogram.observe(Duration::from_millis(2));
        let mut text = Text::default();
        text.histogram("h_seconds", "Help.").observed(&[("a", "x")], &histogram).observed(&[], &histogram);
        let text = String::from(text);
        for line in [
            "h_seconds_bucket{a=\"x\",le=\"0.001\"} 0",
            "h_seconds_bucket{a=\"x\",le=\"0.0025\"} 1",
            "h_seconds_bucket{a=\"x\",le=\"+Inf\"} 1",
            "h_seconds_sum{a=\"x\"} 0.002",
            "h_seconds_count{a=\"x\"} 1",
            "h_seconds_bucket{le=\"300\"} 1",
            "h_seconds_sum 0.002",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
