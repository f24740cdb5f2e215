//! Formats times, durations and sizes for the pages, and rows as comma-separated values.

use std::time::Duration;

use maud::{Markup, html};
use serde::Serialize;
use serde_json::Value;

use crate::text::{count, grouped};
use crate::when::Zone;

/// A time to the minute. The script gives every time a tooltip with the reader's own time.
pub fn minute(unix: i64, zone: &Zone) -> Markup {
    time_element(unix, zone, zone.format_once(unix, "%F %H:%M"))
}

pub fn second(unix: i64, zone: &Zone) -> Markup {
    time_element(unix, zone, zone.format_once(unix, "%F %T"))
}

pub fn date(unix: i64, zone: &Zone) -> Markup {
    time_element(unix, zone, zone.format(unix, "%F"))
}

fn time_element(unix: i64, zone: &Zone, text: Option<String>) -> Markup {
    match (zone.iso(unix), text) {
        (Some(exact), Some(text)) => html! { time datetime=(exact) { (text) } },
        _ => html! { "–" },
    }
}

/// The time of an event that may not happen.
pub fn or_never(time: Option<i64>, format: impl Fn(i64) -> Markup) -> Markup {
    time.map_or_else(|| html! { "never" }, format)
}

/// A number; a dash if it was not measured.
pub fn figure(number: Option<i64>) -> String {
    number.map_or("–".into(), grouped)
}

/// A share in percent. Rounding never makes it 0 % or 100 %.
pub fn rate(part: i64, all: i64) -> String {
    if all == 0 {
        return "–".into();
    }
    let percent = part as f64 / all as f64 * 100.0;
    match percent {
        p if part == all || p == 0.0 => format!("{p:.0} %"),
        p if p < 0.1 => "< 0.1 %".into(),
        p if p > 99.99 => "> 99.99 %".into(),
        p if p > 99.9 => format!("{p:.2} %"),
        p => format!("{:.1} %", p.min(99.9)),
    }
}

/// A duration; a dash if it was not measured.
pub fn measured_duration(milliseconds: Option<f64>) -> String {
    milliseconds.map_or("–".into(), duration)
}

/// A duration to three digits, in the unit that fits it.
pub fn duration(milliseconds: f64) -> String {
    let (value, unit) = if milliseconds < 999.5 {
        (milliseconds, "ms")
    } else {
        (milliseconds / 1000.0, "s")
    };
    match value {
        value if value < 9.995 => format!("{value:.2} {unit}"),
        value if value < 99.95 => format!("{value:.1} {unit}"),
        value => format!("{} {unit}", grouped(value.round() as i64)),
    }
}

/// A duration of seconds to days, in words.
pub fn long_duration(time: Duration) -> String {
    let seconds = time.as_secs() as i64;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match hours {
        0 if minutes == 0 => count(seconds, "second"),
        0 => count(minutes, "minute"),
        1..48 => count(hours, "hour") + ", " + &count(minutes % 60, "minute"),
        _ => count(hours / 24, "day") + ", " + &count(hours % 24, "hour"),
    }
}

pub fn bytes(size: u64) -> String {
    let kib = size as f64 / 1024.0;
    match kib {
        kib if kib < 1024.0 => format!("{kib:.0} KiB"),
        kib if kib < 1024.0 * 1024.0 => format!("{:.1} MiB", kib / 1024.0),
        kib => format!("{:.1} GiB", kib / 1024.0 / 1024.0),
    }
}

/// Returns the members of a row that the columns name, as cells; null is an empty one.
pub fn cells<'a>(row: &impl Serialize, columns: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let row = serde_json::to_value(row).expect("a row should have its JSON");
    let cell = |name: &str| match &row[name] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        // JSON would write 7.0.
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        other => other.to_string(),
    };
    columns.into_iter().map(cell).collect()
}

/// Formats a CSV line (RFC 4180), with every cell in quotes.
pub fn csv_line(cells: &[impl AsRef<str>]) -> String {
    let quoted: Vec<String> = cells
        .iter()
        .map(|cell| {
            format!(
                "\"{}\"",
                without_formulas(cell.as_ref()).replace('"', "\"\"")
            )
        })
        .collect();
    quoted.join(",") + "\r\n"
}

/// Puts an apostrophe before a sign that makes a spreadsheet read a formula, at the beginning of
/// the cell and after a semicolon, which ends a cell in many countries.
fn without_formulas(cell: &str) -> String {
    let mut text = String::with_capacity(cell.len());
    let mut may_begin = true;
    for character in cell.chars() {
        let is_sign = matches!(
            character,
            '=' | '+' | '-' | '@' | '＝' | '＋' | '－' | '＠' | '\t' | '\r' | '\n'
        );
        if may_begin && is_sign {
            text.push('\'');
        }
        may_begin = character == ';' || (may_begin && !is_sign && character.is_whitespace());
        text.push(character);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::when::tests::zone;

    #[test]
    fn times_durations_and_sizes() {
        assert_eq!(
            minute(978_307_261, &Zone::utc()).into_string(),
            "<time datetime=\"2001-01-01T00:01:01Z\">2001-01-01 00:01</time>"
        );
        let zagreb = zone("Europe/Zagreb");
        assert_eq!(
            date(978_307_261, &zagreb).into_string(),
            "<time datetime=\"2001-01-01T01:01:01+01:00\">2001-01-01</time>"
        );
        assert_eq!(
            second(1_792_891_800, &zagreb).into_string(),
            "<time datetime=\"2026-10-25T02:30:00+01:00\">2026-10-25 02:30:00+01:00</time>"
        );
        assert_eq!(second(i64::MAX, &zagreb).into_string(), "–");
        for (ms, text) in [
            (0.0, "0.00 ms"),
            (7.256, "7.26 ms"),
            (42.44, "42.4 ms"),
            (126.0, "126 ms"),
            (999.6, "1.00 s"),
            (12_345.0, "12.3 s"),
        ] {
            assert_eq!(duration(ms), text);
        }
        for (seconds, text) in [
            (1, "1 second"),
            (61, "1 minute"),
            (7_260, "2 hours, 1 minute"),
            (180_000, "2 days, 2 hours"),
        ] {
            assert_eq!(long_duration(Duration::from_secs(seconds)), text);
        }
        assert_eq!(
            (bytes(4096), bytes(5 << 30)),
            ("4 KiB".into(), "5.0 GiB".into())
        );
    }

    #[test]
    fn a_rate_is_whole_only_where_it_is() {
        for (part, all, text) in [
            (0, 0, "–"),
            (0, 9, "0 %"),
            (9, 9, "100 %"),
            (1, 3, "33.3 %"),
            (1, 100_000, "< 0.1 %"),
            (9_996, 10_000, "99.96 %"),
            (999_999, 1_000_000, "> 99.99 %"),
        ] {
            assert_eq!(rate(part, all), text, "{part} of {all}");
        }
    }

    #[test]
    fn comma_separated_values() {
        let row = json!({"f": "=1+1", "b": "a,b", "c": "say \"x\"", "a": null, "g": 7.0, "h": 1.5, "i": 7, "j": true});
        let line = csv_line(&cells(&row, ["a", "b", "c", "f", "g", "h", "i", "j"]));
        assert_eq!(
            line,
            "\"\",\"a,b\",\"say \"\"x\"\"\",\"'=1+1\",\"7\",\"1.5\",\"7\",\"true\"\r\n"
        );
    }

    #[test]
    fn no_cell_is_a_formula() {
        for sign in ["=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r"] {
            assert_eq!(csv_line(&[format!("{sign}1")]), format!("\"'{sign}1\"\r\n"));
            assert_eq!(
                csv_line(&[format!("a; {sign}1;{sign}")]),
                format!("\"a; '{sign}1;'{sign}\"\r\n")
            );
        }
        for harmless in ["a=b", "2026-11-15T00:00:00Z", "a-b; c-d", "", "1 - 2"] {
            assert_eq!(csv_line(&[harmless]), format!("\"{harmless}\"\r\n"));
        }
    }
}
