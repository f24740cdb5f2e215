//! The form for a new key and for a change of a key.

use maud::{Markup, html};

use crate::keys::{
    Budget, BudgetPeriod, CONCURRENT_TAKES, Key, KeyName, KeyTerms, Permission, parse_concurrent,
};
use crate::report::query::Form;
use crate::when::{self, When, Zone};

/// The terms in place of a date.
const TERMS: [(&str, &str); 5] = [
    ("", "on this date"),
    ("7d", "in 7 days"),
    ("30d", "in 30 days"),
    ("90d", "in 90 days"),
    ("365d", "in a year"),
];

/// The name of a field with a wrong value, and the message about it.
pub type WrongField = (&'static str, String);

pub fn of_new_key() -> Form {
    Form(vec![(
        "permission".into(),
        Permission::Completions.as_str().into(),
    )])
}

/// The form of a key as it is.
pub fn of_key(key: &Key, zone: &Zone) -> Form {
    let terms = &key.terms;
    let mut fields = vec![("name", key.name.clone())];
    let permissions = terms.permissions.iter();
    fields.extend(permissions.map(|permission| ("permission", permission.as_str().into())));
    fields.extend(terms.expires.map(|time| ("expires", last_day(time, zone))));
    fields.extend(
        terms
            .concurrent
            .map(|number| ("concurrent", number.to_string())),
    );
    if let Some(Budget { tokens, per, .. }) = terms.budget {
        fields.push(("budget", tokens.to_string()));
        fields.push(("budget_per", per.as_str().into()));
    }
    let fields = fields.into_iter();
    Form(
        fields
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}

fn permissions(form: &Form) -> Vec<Permission> {
    let is_chosen = |permission: &Permission| {
        form.all("permission")
            .any(|word| word == permission.as_str())
    };
    Permission::ALL.into_iter().filter(is_chosen).collect()
}

fn period(form: &Form) -> BudgetPeriod {
    BudgetPeriod::parse(form.get("budget_per")).unwrap_or(BudgetPeriod::Month)
}

/// Checks all fields, and returns their values. `present` is the key's expiry.
pub fn check(
    form: &Form,
    present: Option<i64>,
    now: i64,
    zone: &Zone,
) -> Result<(KeyName, KeyTerms), WrongField> {
    let field = |name| form.get(name).trim();
    let name = KeyName::parse(field("name"))
        .ok_or_else(|| ("name", format!("The name has {}.", KeyName::TAKES)))?;
    let permissions = permissions(form);
    if permissions.is_empty() {
        return Err(("permission", "Choose at least one permission.".into()));
    }
    let wanted = match field("term") {
        "" => field("expires"),
        term => term,
    };
    let expires = match (wanted, present) {
        ("", _) => None,
        // It is kept to the second.
        (day, Some(time)) if day == last_day(time, zone) => present,
        (day, _) => Some(expiry(day, now, zone).map_err(|message| ("expires", message))?),
    };
    let concurrent = match field("concurrent") {
        "" => None,
        text => Some(parse_concurrent(text).ok_or_else(|| {
            let message = format!("Concurrent requests: {CONCURRENT_TAKES}, or leave it empty.");
            ("concurrent", message)
        })?),
    };
    let budget = match field("budget") {
        "" => None,
        text => {
            // People separate thousands, and so does the console.
            let tokens = text.replace([',', ' '], "");
            let budget = Budget::parse(&format!("{tokens}/{}", period(form).as_str()));
            let message = "Budget: a number of tokens from 1 to 1000000000000, or leave it empty.";
            Some(budget.ok_or(("budget", message.to_owned()))?)
        }
    };
    let terms = KeyTerms {
        permissions,
        expires,
        concurrent,
        budget,
    };
    Ok((name, terms))
}

/// The day on which a key that expires at a time is accepted for the last time.
fn last_day(expires: i64, zone: &Zone) -> String {
    zone.date(expires - 1).to_string()
}

/// The end of a day, which is a date; or any time that the commands take.
fn expiry(day: &str, now: i64, zone: &Zone) -> Result<i64, String> {
    let when = When::parse(day).ok_or("Give the date as YYYY-MM-DD, or leave it empty.")?;
    let expires = when.expiry(now, zone)?;
    if expires <= now {
        return Err("The date lies in the past.".into());
    }
    Ok(expires)
}

/// The fields as HTML, of which one may be marked as wrong. That one has the focus.
pub fn fields(
    form: &Form,
    present: Option<i64>,
    wrong: Option<&WrongField>,
    zone: &Zone,
) -> Markup {
    let invalid = |field: &str| wrong.filter(|(name, _)| *name == field).map(|_| "true");
    let has_focus = |field: &str| field == wrong.map_or("name", |(name, _)| name);
    let permissions = permissions(form);
    // The date of an expired key is kept, too.
    let first_day = present.is_none().then(|| zone.date(when::now()));
    let text = |name: &str, most: &str| {
        let is_number = name != "name";
        html! {
            input id=(name) name=(name) value=(form.get(name)) maxlength=(most) autocomplete="off" required[!is_number]
                inputmode=[is_number.then_some("numeric")] autofocus[has_focus(name)]
                aria-describedby={ (name) "-help" } aria-invalid=[invalid(name)];
        }
    };
    html! {
        @if let Some((_, message)) = wrong { p.alert role="alert" { (message) " Nothing was changed." } }
        label for="name" { "Name" }
        (text("name", "64"))
        p.help #name-help { "What uses it, so that you recognize it: “billing service”, “Ana’s laptop”." }
        fieldset aria-invalid=[invalid("permission")] {
            legend { "Permissions" }
            @for permission in Permission::ALL {
                label.choice {
                    input type="checkbox" name="permission" value=(permission.as_str()) checked[permissions.contains(&permission)]
                        autofocus[has_focus("permission") && permission == Permission::Completions];
                    span { strong { (permission.as_str()) } " – " (permission.in_words()) }
                }
            }
        }
        label for="expires" { "Expires" }
        div.pair {
            input #expires type="date" name="expires" value=(form.get("expires")) min=[first_day]
                autofocus[has_focus("expires")] aria-describedby="expires-help" aria-invalid=[invalid("expires")];
            select name="term" aria-label="Date or term of the expiry" {
                @for (value, text) in TERMS { option value=(value) selected[value == form.get("term")] { (text) } }
            }
        }
        p.help #expires-help {
            "The last day on which it is accepted. Empty: it never expires."
            @if let Some(time) = present { " At present: until " (zone.format_end(time)) "." }
        }
        label for="concurrent" { "Concurrent requests" }
        (text("concurrent", "16"))
        p.help #concurrent-help { "The limit of each gateway; more requests wait for their turn. Empty: any number." }
        label for="budget" { "Budget in tokens" }
        div.pair {
            (text("budget", "32"))
            select name="budget_per" aria-label="Period of the budget" {
                @for (value, text) in [(BudgetPeriod::Day, "per day"), (BudgetPeriod::Month, "per month")] {
                    option value=(value.as_str()) selected[value == period(form)] { (text) }
                }
            }
        }
        p.help #budget-help { "When it is used up, requests get 403 until the next calendar day or month. Empty: no budget." }
    }
}
