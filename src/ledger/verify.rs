//! Verifies the chains and the sums: walks every chain, then counts the rows of every day and
//! compares them with its sums, in both directions.
//!
//! Retention removes rows and leaves their sums. Such sums are larger than those of the rows that
//! are left, and all of them together by as many requests as were removed: by the number at which
//! the chain of the gateway now begins.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::append::Ledger;
use super::days::{Filter, Source, Span, SpanSums, Sums};
use super::{COLUMNS, ChainLink};
use crate::database::{Row, Session, Value, values};
use crate::error::{Problem, Result};
use crate::id::RequestId;
use crate::progress::Progress;
use crate::text::count;
use crate::when::{DAY, Range, Zone};

/// A place in a gateway's chain, as an operator notes it elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainHead {
    /// Empty for the chain of a SQLite database.
    pub gateway: String,
    pub seq: i64,
    #[serde(serialize_with = "hex::serialize")]
    pub hash: [u8; 32],
}

impl ChainHead {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, hash) = text.rsplit_once(':')?;
        let (gateway, seq) = rest.rsplit_once(':').unwrap_or(("", rest));
        let seq = seq.parse().ok().filter(|&seq| seq >= 0)?;
        Some(Self {
            gateway: gateway.to_owned(),
            seq,
            hash: hex::decode(hash).ok()?.try_into().ok()?,
        })
    }
}

/// `SEQ:HASH`, or `GATEWAY:SEQ:HASH`.
impl fmt::Display for ChainHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.gateway.is_empty() {
            write!(f, "{}:", self.gateway)?;
        }
        write!(f, "{}:{}", self.seq, hex::encode(self.hash))
    }
}

/// The state of a head that was noted earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadStatus {
    InChain,
    /// Retention has removed its row and the one after it, so it can't be checked.
    Removed,
    /// The chain was replaced, or cut before it.
    Missing,
}

/// The result of a walk along all chains, and of a comparison of the sums with their rows.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Verification {
    pub rows: u64,
    /// The number of sums that equal those of their rows.
    pub sums: u64,
    pub unproven: Option<UnprovenDays>,
    /// The end of each chain that has or had rows, by the gateway's name; if none has, one with
    /// `seq` 0.
    pub heads: Vec<ChainHead>,
    /// The first thing that is wrong, as a sentence without its full stop.
    pub fault: Option<String>,
}

/// Days whose sums can't be proven any more, because retention has removed rows of theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnprovenDays {
    #[serde(rename = "days")]
    pub count: u64,
    /// The date of the last one.
    pub until: String,
}

impl Ledger {
    /// Walks every chain, then compares all sums with their rows, on one state of the database.
    pub fn verify_with(&self, progress: &Progress) -> Result<Verification> {
        self.database.report(|session| verify(session, progress))
    }

    /// Returns whether a head that was noted earlier is part of its chain, which `verify` has to
    /// find sound too.
    pub fn find_head(&self, noted: &ChainHead) -> Result<HeadStatus> {
        let ChainHead { gateway, seq, hash } = noted;
        let link = "SELECT seq, hash FROM usage WHERE gateway = $1 AND seq = $2
            UNION ALL SELECT anchor_seq, anchor_hash FROM gateways WHERE name = $1 AND anchor_seq >= $2";
        let found = self
            .database
            .read(|session| session.first(link, &values![gateway, *seq], ChainLink::read))?;
        Ok(match found {
            Some(link) if link.seq > *seq => HeadStatus::Removed,
            Some(link) if link.hash == *hash => HeadStatus::InChain,
            _ => HeadStatus::Missing,
        })
    }
}

pub fn verify(session: &Session, progress: &Progress) -> Result<Verification> {
    let mut chains = read_chains(session)?;
    // A row without a number: its place in the order of the chain depends on the engine.
    let unplaced = "SELECT request_id FROM usage
        WHERE gateway IN (SELECT name FROM gateways) AND seq IS NULL LIMIT 1";
    let unplaced = session.first(unplaced, &[], |mut row| row.column::<String>())?;
    let (mut rows, mut fault) = (0, unplaced.map(|id| inserted(&id)));
    session.query(&select("ORDER BY gateway, seq"), &[], &mut |mut row| {
        if fault.is_none() {
            progress.show("verifying the rows", rows);
            let (id, gateway): (String, String) = (row.column()?, row.column()?);
            fault = match chains.get_mut(&gateway) {
                Some(chain) => chain.follow(&id, row)?,
                None => Some(changed(&id)),
            };
            rows += u64::from(fault.is_none());
        }
        Ok(())
    })?;
    let fault = fault.or_else(|| {
        chains
            .iter()
            .find_map(|(gateway, chain)| chain.wrong_end(gateway))
    });
    let mut found = Verification {
        rows,
        sums: 0,
        unproven: None,
        heads: heads(&chains),
        fault: fault.map(|fault| format!("after {}: {fault}", count(rows as i64, "good row"))),
    };
    if found.fault.is_none() {
        let mut days = Days {
            chains,
            counted: BTreeMap::new(),
            compared_to: String::new(),
            proven: 0,
            unproven: None,
        };
        let fault = days.compare(session, progress)?;
        let rows = count(rows as i64, "row");
        found.fault = fault.map(|fault| format!("nothing wrong in {rows}, but {fault}"));
        (found.sums, found.unproven) = (days.proven, days.unproven);
    }
    Ok(found)
}

/// Walks the newest rows of each chain, at most so many, and fails if they do not lead to its head:
/// a file that was exchanged under its WAL lacks some of them.
pub fn check_newest(session: &Session, most: i64) -> Result<()> {
    for (gateway, mut chain) in read_chains(session)? {
        let mut fault = None;
        let first = chain.end.seq.saturating_sub(most);
        if first > chain.last.seq {
            let link = "SELECT seq, hash FROM usage WHERE gateway = $1 AND seq = $2";
            match session.first(link, &values![&gateway, first], ChainLink::read)? {
                Some(last) => chain.last = last,
                None => fault = Some(format!("row {first}{} is missing", of(&gateway))),
            }
        }
        let newest = select("WHERE gateway = $1 AND seq > $2 ORDER BY seq");
        let after = values![&gateway, chain.last.seq];
        session.query(&newest, &after, &mut |mut row| {
            if fault.is_none() {
                let (id, _): (String, String) = (row.column()?, row.column()?);
                fault = chain.follow(&id, row)?;
            }
            Ok(())
        })?;
        if let Some(fault) = fault.or_else(|| chain.wrong_end(&gateway)) {
            return Err(Problem::damaged(fault));
        }
    }
    Ok(())
}

/// Selects rows: id, gateway, time and place of each, then all columns.
fn select(which: &str) -> String {
    format!("SELECT request_id, gateway, created, seq, {COLUMNS} FROM usage {which}")
}

struct Chain {
    /// Where it begins: the newest row that retention has removed.
    anchor: ChainLink,
    /// How far it was walked.
    last: ChainLink,
    /// Its end, as the gateway's row has it.
    end: ChainLink,
    /// The requests that the sums count more than the rows.
    missing: i64,
}

/// All chains, by the gateway's name.
fn read_chains(session: &Session) -> Result<BTreeMap<String, Chain>> {
    let ends = "SELECT name, anchor_seq, anchor_hash, head_seq, head_hash FROM gateways";
    let chains = session.rows(ends, &[], |mut row| {
        let name = row.column()?;
        let anchor = ChainLink {
            seq: row.column()?,
            hash: row.column()?,
        };
        let chain = Chain {
            anchor,
            last: anchor,
            end: ChainLink::read(row)?,
            missing: 0,
        };
        Ok((name, chain))
    })?;
    Ok(chains.into_iter().collect())
}

impl Chain {
    /// Goes on to the next row. Returns what is wrong with it.
    fn follow(&mut self, id: &str, mut row: Row) -> Result<Option<String>> {
        let (created, seq): (i64, Option<i64>) = (row.column()?, row.column()?);
        let mut values = row.values();
        let hash = values.pop();
        let link = self.last.following(&values);
        // The sums are compared by the time in the id.
        let is_sound =
            hash == Some(Value::Blob(link.hash.into())) && RequestId::time_of(id) == Some(created);
        Ok(match seq.map(|seq| seq.saturating_sub(link.seq)) {
            None | Some(..0) => Some(inserted(id)),
            Some(1) => Some(format!("1 row was removed before that of {id}")),
            Some(rows @ 2..) => Some(format!(
                "{} were removed before that of {id}",
                count(rows, "row")
            )),
            Some(0) if !is_sound => Some(changed(id)),
            Some(0) => {
                self.last = link;
                None
            }
        })
    }

    /// Returns what is wrong if it does not end where its gateway says.
    fn wrong_end(&self, gateway: &str) -> Option<String> {
        let of = of(gateway);
        match self.end.seq.saturating_sub(self.last.seq) {
            0 if self.end.hash == self.last.hash => None,
            1 => Some(format!("the newest row{of} was removed")),
            rows @ 2.. => Some(format!("the newest {rows} rows{of} were removed")),
            _ => Some(format!("the end of the chain{of} was changed")),
        }
    }

    /// Returns what is wrong if the sums count more or fewer requests than it has had.
    fn wrong_total(&self, gateway: &str) -> Option<String> {
        let (all, removed) = (self.end.seq, self.anchor.seq);
        let requests = all.saturating_sub(removed).saturating_add(self.missing);
        (self.missing != removed).then(|| {
            format!(
                "the sums{} count {}, but its chain has had {}",
                of(gateway),
                count(requests, "request"),
                count(all, "row")
            )
        })
    }
}

fn heads(chains: &BTreeMap<String, Chain>) -> Vec<ChainHead> {
    let head = |(gateway, chain): (&String, &Chain)| ChainHead {
        gateway: gateway.clone(),
        seq: chain.last.seq,
        hash: chain.last.hash,
    };
    let mut heads: Vec<ChainHead> = chains.iter().map(head).collect();
    match heads.iter().any(|head| head.seq > 0) {
        true => heads.retain(|head| head.seq > 0),
        false => heads.truncate(1),
    }
    heads
}

fn changed(id: &str) -> String {
    format!("the row of {id} was changed or moved")
}

fn inserted(id: &str) -> String {
    format!("the row of {id} was inserted: it has no place of its own in the chain")
}

fn of(gateway: &str) -> String {
    match gateway {
        "" => String::new(),
        name => format!(" of the gateway {name}"),
    }
}

/// What the rows of one sum have in common: day, key, status, error code and gateway.
type DayKey = (String, String, Option<i64>, Option<String>, String);

/// The comparison of the days with their rows.
struct Days {
    chains: BTreeMap<String, Chain>,
    /// The sums of rows whose days were not compared yet.
    counted: BTreeMap<DayKey, Sums>,
    /// All days before this date were compared.
    compared_to: String,
    proven: u64,
    unproven: Option<UnprovenDays>,
}

impl Days {
    /// Counts the rows of 24 hours at a time. A day is compared once no row of it can follow: days
    /// of a zone begin at most 14 hours before those of UTC, and end 12 hours after them.
    fn compare(&mut self, session: &Session, progress: &Progress) -> Result<Option<String>> {
        let next_row = "SELECT min(request_id) FROM usage WHERE request_id >= $1";
        let (mut since, mut compared) = (0, 0);
        loop {
            progress.show("verifying the sums", compared);
            let next: Option<String> = session.value(next_row, &values![RequestId::from(since)])?;
            let Some(time) = next.and_then(|id| RequestId::time_of(&id)) else {
                let fault = self.compare_before(session, "a".into())?;
                let mut chains = self.chains.iter();
                return Ok(
                    fault.or_else(|| chains.find_map(|(name, chain)| chain.wrong_total(name)))
                );
            };
            since = time - time % DAY;
            let before = Zone::utc().date(since - 2 * DAY).to_string();
            let fault = self.compare_before(session, before)?;
            if fault.is_some() {
                return Ok(fault);
            }
            let until = since + DAY;
            let rows = Source::Rows(Range { since, until });
            rows.read(session, Span::Day, &Filter::ALL, |row| {
                let (key, sums) = keyed(row);
                compared += sums.requests as u64;
                self.counted.entry(key).or_default().add(&sums);
                Ok(())
            })?;
            since = until;
        }
    }

    /// Compares the days before a date that were not compared yet.
    fn compare_before(&mut self, session: &Session, date: String) -> Result<Option<String>> {
        let date = date.max(self.compared_to.clone());
        let kept = Source::Days([self.compared_to.clone(), date.clone()]);
        let mut fault = None;
        kept.read(session, Span::Day, &Filter::ALL, |row| {
            if fault.is_none() {
                let (key, kept) = keyed(row);
                let counted = self.counted.remove(&key);
                fault = self.compare_sums(&key, &kept, &counted.unwrap_or_default());
            }
            Ok(())
        })?;
        // Rows without sums are left.
        let left = self.counted.first_key_value();
        if let Some((key, _)) = left.filter(|(key, _)| key.0 < date) {
            fault = fault.or(Some(differs(key, "they are missing")));
        }
        self.compared_to = date;
        Ok(fault)
    }

    fn compare_sums(&mut self, key: &DayKey, kept: &Sums, counted: &Sums) -> Option<String> {
        if kept == counted && kept.requests > 0 {
            self.proven += 1;
            return None;
        }
        let missing = kept.requests.saturating_sub(counted.requests);
        let figures = kept.figures().into_iter().zip(counted.figures());
        let mut pairs = figures.map(|((name, kept), (_, counted))| (name, kept, counted));
        let has_less = missing <= 0 || pairs.clone().any(|(_, kept, counted)| kept < counted);
        match self.chains.get_mut(&key.4) {
            Some(chain) if chain.anchor.seq > 0 && !has_less => {
                chain.missing = chain.missing.saturating_add(missing);
                let unproven = self.unproven.get_or_insert(UnprovenDays {
                    count: 0,
                    until: String::new(),
                });
                // Days are compared in their order.
                if unproven.until != key.0 {
                    unproven.count += 1;
                    unproven.until.clone_from(&key.0);
                }
                None
            }
            _ if counted.requests == 0 => Some(differs(key, "there are no such rows")),
            _ => {
                let (name, kept, counted) = pairs.find(|(_, kept, counted)| kept != counted)?;
                let difference = format!("{name} is {kept}, and {counted} by the rows");
                Some(differs(key, &difference))
            }
        }
    }
}

fn differs((day, key_id, ..): &DayKey, difference: &str) -> String {
    format!("the sums differ: day {day}, key {key_id}: {difference}")
}

fn keyed(row: SpanSums) -> (DayKey, Sums) {
    let key = (row.day, row.key_id, row.status, row.error_code, row.gateway);
    (key, row.sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ProblemKind;
    use crate::ledger::LedgerRow;
    use crate::ledger::append::tests::{id, row, write};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::tests::zone;

    fn ten_rows() -> Temporary {
        let temporary = Temporary::new();
        for number in 0..10 {
            write(
                &temporary.store,
                &number.to_string(),
                "key_1",
                number * 40_000,
                200,
                Some(number),
            );
        }
        temporary
    }

    /// Returns the fault that `verify` finds after some statements, which are then undone.
    #[track_caller]
    fn fault_in(store: &Store, statements: &str) -> Option<String> {
        let found = std::sync::Mutex::new(None);
        let undone = store.database.change(|session| {
            for statement in statements.split(';') {
                assert!(session.execute(statement, &[])? > 0, "{statement}");
            }
            *crate::locks::lock(&found) = verify(session, &Progress::hidden())?.fault;
            Err::<(), _>(Problem::new(ProblemKind::Panicked, "on purpose"))
        });
        let undone = undone.expect_err("it is undone");
        assert_eq!(undone.kind, ProblemKind::Panicked, "{statements}: {undone}");

        crate::locks::lock(&found).take()
    }

    #[test]
    fn a_head_as_it_is_noted() {
        let hash = "0f".repeat(32);
        for text in [format!("7:{hash}"), format!("gateway-1:0:{hash}")] {
            assert_eq!(
                ChainHead::parse(&text).map(|head| head.to_string()),
                Some(text)
            );
        }
        for text in [
            "",
            "7",
            "7:0f",
            ":7",
            &hash,
            &format!("-1:{hash}"),
            &format!("a:b:{hash}"),
            &format!("7:{hash}0f"),
        ] {
            assert_eq!(ChainHead::parse(text), None, "{text}");
        }
    }

    #[test]
    fn an_untouched_ledger_verifies() {
        let temporary = ten_rows();
        let found = temporary.store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, &found.fault), (10, &None));
        let [head] = &found.heads[..] else {
            panic!("one chain")
        };
        assert_eq!((head.gateway.as_str(), head.seq), ("", 10));
    }

    #[test]
    fn an_empty_ledger_has_a_head_to_note() {
        let found = Temporary::new().store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (0, None));
        assert_eq!(
            found.heads.iter().map(|head| head.seq).collect::<Vec<_>>(),
            [0]
        );
    }

    #[test]
    fn what_was_done_to_a_row_is_found() {
        let temporary = ten_rows();
        let store = &temporary.store;
        let check = |statements: &str, good: i64, fault: &str| {
            let after = format!("after {}: ", count(good, "good row"));
            assert_eq!(
                fault_in(store, statements),
                Some(after + fault),
                "{statements}"
            );
        };
        let of = |number: i64| id(&number.to_string(), number * 40_000);
        let changed = |number: i64| format!("the row of {} was changed or moved", of(number));
        for column in [
            "key_id = 'key_2'",
            "key_name = 'x'",
            "created = created + 1",
            "status = 201",
            "error_code = 'x'",
            "prompt_tokens = 0",
            "completion_tokens = NULL",
            "total_tokens = 5",
            "duration_ms = 9",
            "queue_ms = NULL",
            "runtime_ms = 0",
            "grounded = 1",
            "search_reason = 'always'",
            "search_results = 0",
            "search_ms = 1",
            "cause = 'timeout'",
            "day = '1970-01-09'",
            "hash = (SELECT anchor_hash FROM gateways)",
        ] {
            let statement = format!("UPDATE usage SET {column} WHERE seq = 5");
            check(&statement, 4, &changed(4));
        }
        let no_gateway = "UPDATE usage SET gateway = 'x' WHERE seq = 10";
        check(no_gateway, 9, &changed(9));
        let two = format!("2 rows were removed before that of {}", of(6));
        check("DELETE FROM usage WHERE seq IN (5, 6)", 4, &two);
        let one = format!("1 row was removed before that of {}", of(5));
        check("DELETE FROM usage WHERE seq = 5", 4, &one);
        check(
            "DELETE FROM usage WHERE seq > 7",
            7,
            "the newest 3 rows were removed",
        );
        check(
            "DELETE FROM usage WHERE seq > 9",
            9,
            "the newest row was removed",
        );
        let many = format!("90 rows were removed before that of {}", of(9));
        check("UPDATE usage SET seq = 100 WHERE seq = 10", 9, &many);
        for (statement, number) in [
            ("UPDATE usage SET seq = NULL WHERE seq = 5", 4),
            // That of the anchor, and before it.
            ("UPDATE usage SET seq = 0 WHERE seq = 1", 0),
            ("UPDATE usage SET seq = -51 WHERE seq = 10", 9),
        ] {
            let inserted = "was inserted: it has no place of its own in the chain";
            check(
                statement,
                0,
                &format!("the row of {} {inserted}", of(number)),
            );
        }
        // Two rows that changed places.
        let swap =
            "UPDATE usage SET seq = -1 WHERE seq = 3; UPDATE usage SET seq = 3 WHERE seq = 4;
            UPDATE usage SET seq = 4 WHERE seq = -1";
        check(swap, 2, &changed(3));
        for end in ["head_seq = 9", "head_hash = anchor_hash"] {
            let statement = format!("UPDATE gateways SET {end}");
            check(&statement, 10, "the end of the chain was changed");
        }
    }

    #[test]
    fn the_newest_rows_lead_to_the_head() {
        let temporary = ten_rows();
        let store = &temporary.store;
        let check = |most| store.database.read(|session| check_newest(session, most));
        for most in [0, 1, 4, 10, 10_000] {
            check(most).expect("a sound chain");
        }
        store.tamper("UPDATE usage SET status = 201 WHERE seq = 7");
        check(3).expect("the row is older");
        for (statement, fault) in [
            (
                "UPDATE usage SET queue_ms = 7 WHERE seq = 7",
                "was changed or moved",
            ),
            ("DELETE FROM usage WHERE seq = 6", "row 6 is missing"),
            (
                "UPDATE usage SET seq = 6 WHERE seq = 5",
                "was changed or moved",
            ),
            (
                "DELETE FROM usage WHERE seq = 7",
                "1 row was removed before",
            ),
            (
                "DELETE FROM usage WHERE seq > 6",
                "the newest 4 rows were removed",
            ),
        ] {
            store.tamper(statement);
            let found = check(4).expect_err(statement).to_string();
            assert!(found.contains(fault), "{statement}: {found}");
        }
    }

    /// Rows of some minutes, two keys and three outcomes.
    fn filled(now: i64) -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for (number, key) in ["key_1", "key_2"].into_iter().cycle().take(20).enumerate() {
            let (number, end) = (number as i64, number.to_string());
            let total = Some(number).filter(|number| number % 3 > 0);
            let (created, status) = (
                now - 300 + number * 7,
                if number % 5 == 4 { 502 } else { 200 },
            );
            write(store, &end, key, created, status, total);
        }
        let (status, error_code) = (None, Some("abandoned".into()));
        store
            .ledger
            .append(
                LedgerRow {
                    status,
                    error_code,
                    ..row("x", "key_1", now)
                },
                None,
            )
            .expect("a row");
        temporary
    }

    #[test]
    fn a_change_of_any_number_in_the_sums_is_found() {
        // The rows are of one day, and of two.
        for now in [20_000 * DAY + 50_000, 20_000 * DAY + 240] {
            check_every_change(&filled(now).store);
        }
    }

    #[track_caller]
    fn check_every_change(store: &Store) {
        let found = store.ledger.verify().expect("a walk");
        let sums = store.value::<i64>("SELECT count(*) FROM usage_days");
        assert_eq!(
            (found.rows, found.sums as i64, found.unproven, found.fault),
            (21, sums, None, None)
        );
        let these = "WHERE key_id = 'key_1' AND status = 200";
        let inserted = |figures: &str| {
            format!(
                "INSERT INTO usage_days SELECT 'key_9', day, 200, '', '', {figures} FROM usage_days {these}"
            )
        };
        let changes = [
            "day = '1999' || substr(day, 5)",
            "day = 'zzz'",
            "day = ''",
            "key_id = 'key_9'",
            "status = 201",
            "status = 0",
            "error_code = 'x'",
            "gateway = 'x'",
            "requests = requests + 1",
            "requests = 0",
            "prompt_tokens = 1",
            "completion_tokens = completion_tokens - 1",
            "total_tokens = total_tokens + 1000",
            "total_tokens = -total_tokens - 1",
            "total_tokens = 9223372036854775807",
            "requests = 9223372036854775807",
            "requests = -9223372036854775807",
            "unmeasured = unmeasured + 1",
        ];
        let statements = changes.map(|change| {
            // Only of one day, because all of them could not have the same.
            let day = "AND day = (SELECT min(day) FROM usage_days)";
            format!("UPDATE usage_days SET {change} {these} {day}")
        });
        // Two changes that cancel each other out in a sum over all.
        let swap = "UPDATE usage_days SET total_tokens = total_tokens + CASE key_id WHEN 'key_1' THEN 1 ELSE -1 END
            WHERE status = 200";
        for statement in statements.into_iter().chain([
            format!("DELETE FROM usage_days {these}"),
            "DELETE FROM usage_days".into(),
            inserted("1, 0, 0, 0, 0"),
            inserted("0, 0, 0, 0, 0"),
            swap.into(),
        ]) {
            let fault = fault_in(store, &statement).unwrap_or_default();
            assert!(
                fault.starts_with("nothing wrong in 21 rows, but the sums differ: day "),
                "{statement}: {fault}"
            );
        }
        let undone = store.ledger.verify().expect("a walk").fault;
        assert_eq!(undone, None, "all of it was undone");
    }

    #[test]
    fn a_fault_names_the_day_the_key_and_the_figure() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 20_000 * DAY;
        (0..3).for_each(|end| write(store, &end.to_string(), "key_1", now, 200, Some(7)));
        for (change, fault) in [
            (
                "UPDATE usage_days SET requests = 1003",
                "key_1: requests is 1003, and 3 by the rows",
            ),
            (
                "UPDATE usage_days SET total_tokens = 20",
                "key_1: total_tokens is 20, and 21 by the rows",
            ),
            (
                "UPDATE usage_days SET key_id = 'key_0'",
                "key_0: there are no such rows",
            ),
            ("DELETE FROM usage_days", "key_1: they are missing"),
        ] {
            let before = "nothing wrong in 3 rows, but the sums differ: day 2024-10-04, key ";
            assert_eq!(fault_in(store, change), Some(format!("{before}{fault}")));
        }
    }

    /// The rows of a place have its days, which begin before those of UTC or after them.
    #[test]
    fn the_days_of_a_place_verify() {
        for name in ["Pacific/Kiritimati", "America/Los_Angeles"] {
            let mut temporary = Temporary::new();
            temporary.set_zone(zone(name));
            let store = &temporary.store;
            for number in 0..40 {
                let created = 20_000 * DAY + number * 20_000;
                write(store, &number.to_string(), "key_1", created, 200, Some(7));
            }
            let found = store.ledger.verify().expect("a walk");
            assert_eq!(
                (found.rows, found.sums, found.fault),
                (40, 10, None),
                "{name}"
            );
        }
    }

    #[test]
    fn what_retention_has_removed_is_not_proven_and_adds_up() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        let day = 20_000 * DAY;
        for (store, name) in [(&mut temporary.store, "a"), (&mut other, "b")] {
            store.join(name, "").expect("a start");
            for number in 0..4 {
                let end = format!("{name}{number}");
                write(store, &end, "key_1", day + number * 40_000, 200, Some(1));
            }
        }
        let store = &temporary.store;
        let verify = || store.ledger.verify().expect("a walk");
        let found = verify();
        assert_eq!((found.sums, found.unproven, found.fault), (4, None, None));
        let remove = |before| store.ledger.remove_before(before, day + 5 * DAY, 1);
        // Each step removes one row of the first day.
        for proven in [3, 3, 2, 2] {
            assert_eq!(remove(day + 50_000).expect("a step"), 1);
            let found = verify();
            let until = "2024-10-04".into();
            let unproven = Some(UnprovenDays { count: 1, until });
            assert_eq!((found.unproven, found.fault), (unproven, None));
            assert_eq!(found.sums, proven);
        }
        assert_eq!(remove(day + 50_000).expect("a step"), 0);
        let of_a = "WHERE gateway = 'a' AND day = '2024-10-04'";
        let but = "nothing wrong in 4 rows, but the sums";
        for (change, fault) in [
            (
                "requests = requests + 5",
                " of the gateway a count 9 requests, but its chain has had 4 rows",
            ),
            (
                "requests = requests - 1",
                " of the gateway a count 3 requests, but its chain has had 4 rows",
            ),
            (
                "requests = 1",
                " of the gateway a count 3 requests, but its chain has had 4 rows",
            ),
            (
                "requests = 0",
                " differ: day 2024-10-04, key key_1: requests is 0, and 1 by the rows",
            ),
            (
                "completion_tokens = 0",
                " differ: day 2024-10-04, key key_1: requests is 3, and 1 by the rows",
            ),
        ] {
            let statement = format!("UPDATE usage_days SET {change} {of_a}");
            let found = fault_in(store, &statement).unwrap_or_default();
            let is_found = found.starts_with(but);
            assert!(is_found, "{statement}: {found} ({fault})");
        }
        for change in [
            "total_tokens = total_tokens + 1",
            "requests = requests - 1",
            "unmeasured = 1",
        ] {
            let later = format!(
                "UPDATE usage_days SET {change} WHERE gateway = 'a' AND day > '2024-10-04'"
            );
            let found = fault_in(store, &later).unwrap_or_default();
            assert!(
                found.contains("the sums differ: day 2024-10-05"),
                "{change}: {found}"
            );
        }
        let anchor = "UPDATE gateways SET anchor_seq = 0 WHERE name = 'a'";
        assert!(
            fault_in(store, anchor).is_some(),
            "retention has removed none"
        );
    }

    #[test]
    fn a_noted_head_is_part_of_its_chain_or_not() {
        let temporary = ten_rows();
        let store = &temporary.store;
        let head = store.ledger.verify().expect("a walk").heads.remove(0);
        let find = |head: &ChainHead| store.ledger.find_head(head).expect("a look");
        assert_eq!(head.to_string(), format!("10:{}", hex::encode(head.hash)));
        assert_eq!(find(&head), HeadStatus::InChain);
        assert_eq!(
            find(&ChainHead {
                hash: [7; 32],
                ..head.clone()
            }),
            HeadStatus::Missing
        );
        assert_eq!(
            find(&ChainHead {
                seq: 11,
                ..head.clone()
            }),
            HeadStatus::Missing
        );
        let other_chain = ChainHead {
            gateway: "a".into(),
            ..head.clone()
        };
        assert_eq!(find(&other_chain), HeadStatus::Missing);
        assert!(other_chain.to_string().starts_with("a:10:"));
        while store
            .ledger
            .remove_before(i64::MAX, i64::MAX, 100)
            .expect("a step")
            > 0
        {}
        assert_eq!(find(&head), HeadStatus::InChain, "it is the anchor");
        assert_eq!(find(&ChainHead { seq: 9, ..head }), HeadStatus::Removed);
    }
}
