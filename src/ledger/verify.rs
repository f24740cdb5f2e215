//! Verifies the chains and the sums.

use std::collections::BTreeMap;

use super::append::Ledger;
use super::chain::{ChainHead, ChainLink};
use super::fault::Fault;
use super::row::{COLUMNS, read_row};
use super::sums_check::{self, UnprovenSums};
use crate::database::{Result, Session, TransactionMode, values};
use crate::id::RequestId;
use crate::progress::Progress;

/// The state of a head that was noted earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadStatus {
    InChain,
    /// Retention has removed its row and the one after it, so it can't be checked.
    Removed,
    /// The chain was replaced, or cut before it.
    Missing,
}

/// The result of a walk along all chains, and of a comparison of the sums with their rows.
#[derive(Debug, PartialEq, Eq)]
pub struct Verification {
    pub rows: u64,
    /// The number of sums that equal those of their rows.
    pub sums: u64,
    pub unproven: Option<UnprovenSums>,
    /// The end of each chain that has or had rows, by the gateway's name; if none has, one with
    /// `seq` 0.
    pub heads: Vec<ChainHead>,
    pub fault: Option<Fault>,
}

impl Ledger {
    /// Walks every chain, then compares all sums with their rows, on one state of the database.
    pub fn verify_with(&self, progress: &Progress) -> Result<Verification> {
        self.database
            .run(TransactionMode::Report, |session| verify(session, progress))
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
    let mut verification = walk(session, progress)?;
    if verification.fault.is_none() {
        let found = sums_check::compare(session, progress)?;
        (verification.sums, verification.unproven) = (found.proven, found.unproven);
        verification.fault = found.fault;
    }
    Ok(verification)
}

fn walk(session: &Session, progress: &Progress) -> Result<Verification> {
    let ends =
        "SELECT name, anchor_seq, anchor_hash, head_seq, head_hash FROM gateways ORDER BY name";
    // How far each chain was walked, and its end.
    let mut chains: BTreeMap<String, (ChainLink, ChainLink)> = session
        .rows(ends, &[], |mut row| {
            let (name, anchor) = (
                row.column()?,
                ChainLink {
                    seq: row.column()?,
                    hash: row.column()?,
                },
            );
            Ok((name, (anchor, ChainLink::read(row)?)))
        })?
        .into_iter()
        .collect();
    let rows_of =
        |(anchor, end): &(ChainLink, ChainLink)| end.seq.saturating_sub(anchor.seq).max(0) as u64;
    let all_rows = chains.values().map(rows_of).fold(0, u64::saturating_add);
    let (mut rows, mut fault) = (0, None);
    // Where they are in the order of the chain depends on the engine.
    let unplaced = "SELECT request_id FROM usage WHERE gateway = $1 AND seq IS NULL LIMIT 1";
    for gateway in chains.keys() {
        let found = session.first(unplaced, &values![gateway], |mut row| row.column())?;
        fault = fault.or(found.map(|request_id| Fault::Inserted { request_id }));
    }
    let statement = format!("SELECT hash, {COLUMNS} FROM usage ORDER BY gateway, seq");
    session.query(&statement, &[], &mut |mut columns| {
        if fault.is_some() {
            return Ok(());
        }
        progress.update("verifying the rows", rows, all_rows, "rows");
        let stored: Option<Vec<u8>> = columns.column()?;
        let row = read_row(columns)?;
        let request_id = row.request_id.clone();
        let Some((last, _)) = chains.get_mut(&row.gateway) else {
            fault = Some(Fault::Changed { request_id });
            return Ok(());
        };
        let link = last.following(&row);
        // The sums are compared by the time in the id.
        let is_sound = stored.as_deref() == Some(&link.hash)
            && RequestId::time_of(&request_id) == Some(row.created);
        fault = match row.seq.map(|seq| seq - link.seq) {
            None | Some(..0) => Some(Fault::Inserted { request_id }),
            Some(count @ 1..) => Some(Fault::Removed {
                before: request_id,
                count,
            }),
            Some(0) if !is_sound => Some(Fault::Changed { request_id }),
            Some(0) => {
                *last = link;
                rows += 1;
                None
            }
        };
        Ok(())
    })?;
    let wrong_end = |(gateway, (last, end)): (&String, &(ChainLink, ChainLink))| {
        let gateway = gateway.clone();
        match end.seq - last.seq {
            0 if end.hash == last.hash => None,
            count @ 1.. => Some(Fault::Cut { gateway, count }),
            _ => Some(Fault::End { gateway }),
        }
    };
    let fault = fault.or_else(|| chains.iter().find_map(wrong_end));
    let mut heads: Vec<ChainHead> = chains
        .into_iter()
        .map(|(gateway, (ChainLink { seq, hash }, _))| ChainHead { gateway, seq, hash })
        .collect();
    match heads.iter().any(|head| head.seq > 0) {
        true => heads.retain(|head| head.seq > 0),
        false => heads.truncate(1),
    }
    Ok(Verification {
        rows,
        sums: 0,
        unproven: None,
        heads,
        fault,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{id, write};
    use crate::store::tests::Temporary;

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

    #[track_caller]
    fn fault_after(statements: &str) -> Option<Fault> {
        let temporary = ten_rows();
        temporary.store.tamper(statements);
        temporary.store.ledger.verify().expect("a walk").fault
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
    fn the_progress_of_a_verification_counts_rows_and_then_days() {
        let (progress, lines) = Progress::recorded();
        ten_rows()
            .store
            .ledger
            .verify_with(&progress)
            .expect("a walk");
        let lines: Vec<String> = (lines.lock().expect("no panic").iter())
            .map(|line| line.split(',').next().unwrap_or_default().into())
            .collect();
        let rows = (0..10).map(|row| format!("verifying the rows: {row} of 10 rows"));
        let days = (0..5).map(|day| format!("verifying the sums: {day} of 5 days"));
        assert_eq!(lines, rows.chain(days).collect::<Vec<_>>());
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
        let of = |number: i64| id(&number.to_string(), number * 40_000);
        let altered = |number: i64| {
            Some(Fault::Changed {
                request_id: of(number),
            })
        };
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
            "hash = (SELECT anchor_hash FROM gateways)",
        ] {
            let sql = format!("UPDATE usage SET {column} WHERE seq = 5");
            assert_eq!(fault_after(&sql), altered(4), "{column}");
        }
        assert_eq!(
            fault_after("UPDATE usage SET gateway = 'x' WHERE seq = 10"),
            altered(9),
            "there is no such gateway"
        );
        let removed = Some(Fault::Removed {
            before: of(6),
            count: 2,
        });
        assert_eq!(
            fault_after("DELETE FROM usage WHERE seq IN (5, 6)"),
            removed
        );
        assert_eq!(
            fault_after("DELETE FROM usage WHERE seq > 7"),
            Some(Fault::Cut {
                gateway: String::new(),
                count: 3
            })
        );
        assert_eq!(
            fault_after("UPDATE usage SET seq = 100 WHERE seq = 10"),
            Some(Fault::Removed {
                before: of(9),
                count: 90
            })
        );
        let inserted = |number: i64| {
            Some(Fault::Inserted {
                request_id: of(number),
            })
        };
        assert_eq!(
            fault_after("UPDATE usage SET seq = NULL WHERE seq = 5"),
            inserted(4),
            "no place"
        );
        assert_eq!(
            fault_after("UPDATE usage SET seq = 0 WHERE seq = 1"),
            inserted(0),
            "that of the anchor"
        );
        assert_eq!(
            fault_after("UPDATE usage SET seq = -51 WHERE seq = 10"),
            inserted(9),
            "before the anchor"
        );
        assert_eq!(
            fault_after(
                "UPDATE usage SET seq = -1 WHERE seq = 3; UPDATE usage SET seq = 3 WHERE seq = 4;
                 UPDATE usage SET seq = 4 WHERE seq = -1"
            ),
            altered(3),
            "two rows that changed places"
        );
    }

    #[test]
    fn a_chain_ends_where_its_gateway_says() {
        let end = Some(Fault::End {
            gateway: String::new(),
        });
        assert_eq!(fault_after("UPDATE gateways SET head_seq = 9"), end);
        assert_eq!(
            fault_after("UPDATE gateways SET head_hash = anchor_hash"),
            end
        );
    }

    #[test]
    fn a_fault_says_where_it_is() {
        for (fault, text) in [
            (
                Fault::Changed {
                    request_id: "x".into(),
                },
                "the row of x was changed or moved",
            ),
            (
                Fault::Inserted {
                    request_id: "x".into(),
                },
                "the row of x was inserted: it has no place of its own in the chain",
            ),
            (
                Fault::Removed {
                    before: "x".into(),
                    count: 1,
                },
                "1 row was removed before that of x",
            ),
            (
                Fault::Removed {
                    before: "x".into(),
                    count: 2,
                },
                "2 rows were removed before that of x",
            ),
            (
                Fault::Cut {
                    gateway: String::new(),
                    count: 3,
                },
                "the newest 3 rows were removed",
            ),
            (
                Fault::Cut {
                    gateway: "a".into(),
                    count: 3,
                },
                "the newest 3 rows of the gateway a were removed",
            ),
            (
                Fault::End {
                    gateway: String::new(),
                },
                "the end of the chain was changed",
            ),
            (
                Fault::End {
                    gateway: "a".into(),
                },
                "the end of the chain of the gateway a was changed",
            ),
            (
                Fault::Sums {
                    span: 86_400,
                    start: 86_400,
                    key_id: "x".into(),
                    difference: "a".into(),
                },
                "the sums differ: day 1970-01-02T00:00:00Z, key x: a",
            ),
            (
                Fault::Total {
                    gateway: "a".into(),
                    requests: 9,
                    rows: 1,
                },
                "the sums of the gateway a count 9 requests, but its chain has had 1 row",
            ),
        ] {
            assert_eq!(fault.to_string(), text);
        }
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
