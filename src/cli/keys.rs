//! `keys`: who may use the API.

use super::{Args, CliError, Opt, no_command, open_store, print, print_json, table};
use crate::api::key::{SECRET_DIGITS, SECRET_PREFIX};
use crate::id::secret_hex;
use crate::store::{Key, KeyName, Permission};
use crate::when::{self, When};

const HELP: &str = "\
Makes, lists, renames and revokes API keys. A change holds from the next request on.

Usage: adriaticum keys create NAME [--permission P]... [--expires 90d|DATE]
       adriaticum keys list [--json]
       adriaticum keys rename ID NAME
       adriaticum keys revoke ID

create prints the secret, and nothing else, on standard output. It is not kept and can't be shown again.

Options:
  --permission P   completions (the default) or metrics; may be given for each
  --expires WHEN   from when on the key is refused: 12h, 90d, or a date (YYYY-MM-DD, UTC)
  --json           Print JSON
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    match args.command(HELP, "create, list, rename or revoke")?.as_str() {
        "create" => create(args),
        "list" => list(args),
        "rename" => rename(args),
        "revoke" => revoke(args),
        command => Err(no_command("keys ", command)),
    }
}

fn create(mut args: Args) -> Result<(), CliError> {
    let mut permissions = Vec::new();
    let mut expires = None;
    let mut add_permission = |word: &str| {
        let permission = Permission::parse(word).ok_or("completions or metrics")?;
        if !permissions.contains(&permission) {
            permissions.push(permission);
        }
        Ok(())
    };
    let mut set_expires = |text: &str| {
        expires = Some(When::parse(text).ok_or(When::TAKES)?);
        Ok(())
    };
    let mut options =
        [Opt::Value("permission", &mut add_permission), Opt::Value("expires", &mut set_expires)];
    let [name] = args.words(HELP, ["the new key's NAME"], &mut options)?;
    let name = key_name(&name)?;
    if permissions.is_empty() {
        permissions.push(Permission::Completions);
    }
    let now = when::now();
    let expires = expires.map(|when: When| when.ahead(now));
    if expires.is_some_and(|expires| expires <= now) {
        return Err(CliError::Usage("--expires lies in the past.".into()));
    }
    let store = open_store(&args.config()?)?;
    let secret = SECRET_PREFIX.to_owned() + &secret_hex::<{ SECRET_DIGITS / 2 }>();
    let id = store.add_key(&secret, &name, &permissions, now, expires)?;
    print(&(secret + "\n"))?;
    eprintln!("The key's id is {id}. The secret above is not kept: store it now.");
    Ok(())
}

fn list(mut args: Args) -> Result<(), CliError> {
    let mut json = false;
    let [] = args.words(HELP, [], &mut [Opt::Flag("json", &mut json)])?;
    let keys = open_store(&args.config()?)?.list_keys()?;
    if json {
        return print_json(&keys);
    }
    if keys.is_empty() {
        eprintln!("There are no keys yet. Make one: adriaticum keys create NAME");
        return Ok(());
    }
    let heading = ["id", "name", "permissions", "created", "expires", "last used", "revoked"];
    let mut rows = vec![heading.map(String::from).to_vec()];
    rows.extend(keys.iter().map(row));
    print(&table::lay_out(&rows))
}

fn row(key: &Key) -> Vec<String> {
    let permissions: Vec<&str> = key.permissions.iter().map(|permission| permission.as_str()).collect();
    vec![
        key.id.clone(),
        key.name.clone(),
        permissions.join(","),
        when::shown(Some(key.created)),
        when::shown(key.expires),
        when::shown(key.last_used),
        when::shown(key.revoked),
    ]
}

fn rename(mut args: Args) -> Result<(), CliError> {
    let [id, name] = args.words(HELP, ["the key's ID", "its new NAME"], &mut [])?;
    let name = key_name(&name)?;
    match open_store(&args.config()?)?.rename_key(&id, &name)? {
        true => Ok(()),
        false => Err(no_such_key(&id)),
    }
}

fn revoke(mut args: Args) -> Result<(), CliError> {
    let [id] = args.words(HELP, ["the key's ID"], &mut [])?;
    match open_store(&args.config()?)?.revoke_key(&id, when::now())? {
        true => Ok(()),
        false => Err(no_such_key(&id)),
    }
}

fn key_name(text: &str) -> Result<KeyName, CliError> {
    KeyName::parse(text).ok_or_else(|| CliError::Usage(format!("a key's name has {}.", KeyName::TAKES)))
}

fn no_such_key(id: &str) -> CliError {
    CliError::Failed(format!("there is no key {id:?}. adriaticum keys list shows those that there are."))
}
