//! `usage verify`: finds rows and sums of the ledger that were changed, deleted or inserted.

use serde_json::{Value, json};

use crate::cli::shared::{expecting, open_store, print, print_json};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::ledger::{ChainHead, HeadStatus, Verification};
use crate::progress::Progress;
use crate::text::count;

#[derive(clap::Args)]
pub(super) struct VerifyOptions {
    /// Check also that this head, `[GATEWAY:]SEQ:HASH` as verify printed it earlier, is still part
    /// of its chain
    ///
    /// If it is not, or if retention has removed its row so that it can't be checked, the exit
    /// status is 1.
    #[arg(long, value_name = "HEAD",
          value_parser = expecting("[GATEWAY:]SEQ:HASH, as usage verify prints it", ChainHead::parse))]
    through: Option<ChainHead>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(VerifyOptions { through, json }: VerifyOptions, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let found = store.ledger.verify_with(&Progress::on_stderr())?;
    let find = |head| store.ledger.find_head(&head).map(|status| (status, head));
    let through = through.map(find).transpose()?;
    let failure = failure(&found, through.as_ref());
    if json {
        print_json(&as_json(&found, through.as_ref(), failure.is_none()))?;
    } else if failure.is_none() {
        print(&summary(&found, through.as_ref()))?;
    }
    failure.map_or(Ok(()), |message| Err(Problem::other(message)))
}

/// Returns the reason why the ledger or the given head can't be trusted. A head that can't be
/// checked is a failure too, so that a script notices it.
fn failure(found: &Verification, through: Option<&(HeadStatus, ChainHead)>) -> Option<String> {
    if let Some(fault) = &found.fault {
        return Some(format!("{fault}."));
    }
    let (status, head) = through?;
    let reason = match status {
        HeadStatus::InChain => return None,
        HeadStatus::Removed => {
            "can't be checked: retention has removed its row and later ones. Note a newer head."
        }
        HeadStatus::Missing => {
            "is not part of the chain: the chain was replaced by another one, or its newest rows were removed."
        }
    };
    Some(format!("{head} {reason}"))
}

fn summary(found: &Verification, through: Option<&(HeadStatus, ChainHead)>) -> String {
    let heads = match &found.heads[..] {
        [head] => format!("The head is {head}"),
        heads => heads.iter().fold("The heads are:".into(), |text, head| {
            format!("{text}\n{head}")
        }),
    };
    let through = through.map_or(String::new(), |(_, head)| {
        format!("{head} is part of the chain.\n")
    });
    let unproven = found.unproven.as_ref().map_or(String::new(), |days| {
        format!(
            "The sums of {} until {} can't be proven: retention has removed rows of theirs.\n",
            count(days.count as i64, "day"),
            days.until
        )
    });
    format!(
        "{}, nothing wrong. {heads}\n{unproven}{through}",
        count(found.rows as i64, "row")
    )
}

fn as_json(found: &Verification, through: Option<&(HeadStatus, ChainHead)>, ok: bool) -> Value {
    let members = |ChainHead { gateway, seq, hash }: &ChainHead| json!({"gateway": gateway, "seq": seq, "hash": hex::encode(hash)});
    let through = through.map(|(noted, head)| {
        let mut through = members(head);
        through["status"] = match noted {
            HeadStatus::InChain => "in_chain",
            HeadStatus::Removed => "removed",
            HeadStatus::Missing => "missing",
        }
        .into();
        through
    });
    json!({
        "ok": ok,
        "rows": found.rows,
        "sums": found.sums,
        "unproven": found.unproven.as_ref().map(|days| json!({"days": days.count, "until": days.until})),
        "heads": found.heads.iter().map(members).collect::<Vec<_>>(),
        "fault": found.fault,
        "through": through,
    })
}
