//! The form for a new key and for a change of a key.

use maud::{Markup, html};

use crate::keys::{
    Budget, BudgetPeriod, CONCURRENT_TAKES, Key, KeyName, KeyTerms, Permission, parse_concurrent,
};
use crate::report::form::Form;
use crate::when::{self, When, Zone};

const EXPIRIES: [(&str, &str); 6] = [
    ("", "Never"),
    ("7d", "In 7 days"),
    ("30d", "In 30 days"),
    ("90d", "In 90 days"),
    ("365d", "In a year"),
    ("date", "On a date"),
];

/// The value that keeps the key's expiry.
const KEEP: &str = "keep";

/// The greatest age of a form in seconds: a session lasts no longer.
const OLDEST_FORM: i64 = 12 * when::HOUR;

/// The name of a field with a wrong value, and the message about it.
pub type WrongField = (&'static str, String);

/// The fields as they were filled in.
pub struct KeyForm {
    pub name: String,
    pub permissions: Vec<Permission>,
    expires: String,
    date: String,
    concurrent: String,
    /// A number of tokens, and its period.
    budget: String,
    budget_per: BudgetPeriod,
    /// The time when the form was loaded: a form that is sent twice means the same time by "in 7
    /// days".
    loaded: i64,
}

impl KeyForm {
    pub fn new(now: i64) -> Self {
        Self {
            permissions: vec![Permission::Completions],
            ..Self::read(&Form::default(), now)
        }
    }

    pub fn from_key(key: &Key, now: i64) -> Self {
        let terms = &key.terms;
        let budget = terms.budget;
        Self {
            name: key.name.clone(),
            permissions: terms.permissions.clone(),
            expires: terms.expires.map_or("", |_| KEEP).into(),
            concurrent: terms
                .concurrent
                .map_or(String::new(), |number| number.to_string()),
            budget: budget.map_or(String::new(), |budget| budget.tokens.to_string()),
            budget_per: budget.map_or(BudgetPeriod::Month, |budget| budget.per),
            ..Self::new(now)
        }
    }

    pub fn read(form: &Form, now: i64) -> Self {
        let loaded = form
            .get("loaded")
            .parse()
            .ok()
            .filter(|time| (now - OLDEST_FORM..=now).contains(time));
        Self {
            name: form.get("name").trim().to_owned(),
            permissions: Permission::ALL
                .into_iter()
                .filter(|known| form.all("permission").any(|word| word == known.as_str()))
                .collect(),
            expires: form.get("expires").to_owned(),
            date: form.get("date").to_owned(),
            concurrent: form.get("concurrent").trim().to_owned(),
            budget: form.get("budget").trim().to_owned(),
            budget_per: BudgetPeriod::parse(form.get("budget_per")).unwrap_or(BudgetPeriod::Month),
            loaded: loaded.unwrap_or(now),
        }
    }

    /// Checks all fields, and returns their values. `present` is the key's expiry.
    pub fn check(
        &self,
        present: Option<i64>,
        now: i64,
        zone: &Zone,
    ) -> Result<(KeyName, KeyTerms), WrongField> {
        let name = KeyName::parse(&self.name)
            .ok_or_else(|| ("name", format!("The name has {}.", KeyName::TAKES)))?;
        if self.permissions.is_empty() {
            return Err(("permission", "Choose at least one permission.".into()));
        }
        let expires = match (self.expires.as_str(), When::parse(&self.date)) {
            ("" | KEEP, _) => None,
            ("date", date @ Some(When::Date(_))) => date,
            ("date", _) => return Err(("date", "Give the date as YYYY-MM-DD.".into())),
            (term, _) => match When::parse(term) {
                None => return Err(("expires", "Choose when it expires.".into())),
                term => term,
            },
        };
        let expires = match self.expires.as_str() {
            KEEP => present,
            _ => expires
                .map(|term| term.expiry(self.loaded, zone))
                .transpose()
                .map_err(|message| ("expires", message))?,
        };
        if self.expires != KEEP && expires.is_some_and(|expires| expires <= now) {
            return Err(("date", "The date lies in the past.".into()));
        }
        let concurrent = match self.concurrent.as_str() {
            "" => None,
            text => Some(parse_concurrent(text).ok_or_else(|| {
                let message =
                    format!("Concurrent requests: {CONCURRENT_TAKES}, or leave it empty.");
                ("concurrent", message)
            })?),
        };
        let budget = match self.budget.as_str() {
            "" => None,
            tokens => {
                let message =
                    "Budget: a number of tokens from 1 to 1000000000000, or leave it empty.";
                // People separate thousands, and so does the console.
                let tokens = tokens.replace([',', ' '], "");
                let budget = Budget::parse(&format!("{tokens}/{}", self.budget_per.as_str()));
                Some(budget.ok_or(("budget", message.to_owned()))?)
            }
        };
        let terms = KeyTerms {
            permissions: self.permissions.clone(),
            expires,
            concurrent,
            budget,
        };
        Ok((name, terms))
    }

    /// The fields as HTML, of which one may be marked as wrong. That one has the focus.
    pub fn fields(&self, present: Option<i64>, wrong: Option<&WrongField>, zone: &Zone) -> Markup {
        let invalid = |field: &str| wrong.filter(|(name, _)| *name == field).map(|_| "true");
        let has_focus = |field: &str| field == wrong.map_or("name", |(name, _)| name);
        html! {
            input type="hidden" name="loaded" value=(self.loaded);
            label for="name" { "Name" }
            input #name name="name" value=(self.name) required maxlength="64" autocomplete="off" autofocus[has_focus("name")]
                aria-describedby="name-help" aria-invalid=[invalid("name")];
            p.help #name-help { "What uses it, so that you recognize it: “billing service”, “Ana’s laptop”." }
            fieldset aria-invalid=[invalid("permission")] {
                legend { "Permissions" }
                @for permission in Permission::ALL {
                    label.choice {
                        input type="checkbox" name="permission" value=(permission.as_str()) checked[self.permissions.contains(&permission)]
                            autofocus[has_focus("permission") && permission == Permission::Completions];
                        span { strong { (permission.as_str()) } " – " (permission.in_words()) }
                    }
                }
            }
            label for="expires" { "Expires" }
            select #expires name="expires" autofocus[has_focus("expires")] aria-invalid=[invalid("expires")] {
                @if let Some(time) = present {
                    option value=(KEEP) selected[self.expires == KEEP] { (zone.format_local(time)) " (unchanged)" }
                }
                @for (value, text) in EXPIRIES { option value=(value) selected[self.expires == value] { (text) } }
            }
            div.date {
                label for="date" { "Date, if it expires on one" }
                input #date type="date" name="date" value=(self.date) min=(zone.date(when::now()))
                    autofocus[has_focus("date")] aria-invalid=[invalid("date")];
            }
            label for="concurrent" { "Concurrent requests" }
            input #concurrent name="concurrent" value=(self.concurrent) inputmode="numeric" autocomplete="off"
                autofocus[has_focus("concurrent")] aria-describedby="concurrent-help" aria-invalid=[invalid("concurrent")];
            p.help #concurrent-help { "The limit of each gateway; more requests wait for their turn. Empty: any number." }
            label for="budget" { "Budget in tokens" }
            div.pair {
                input #budget name="budget" value=(self.budget) inputmode="numeric" autocomplete="off"
                    autofocus[has_focus("budget")] aria-describedby="budget-help" aria-invalid=[invalid("budget")];
                select name="budget_per" aria-label="Period of the budget" {
                    @for (period, text) in [(BudgetPeriod::Day, "per day"), (BudgetPeriod::Month, "per month")] {
                        option value=(period.as_str()) selected[self.budget_per == period] { (text) }
                    }
                }
            }
            p.help #budget-help { "When it is used up, requests get 403 until the next calendar day or month. Empty: no budget." }
        }
    }
}
