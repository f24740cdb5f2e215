//! The names of users and groups.

use std::fs;

/// Returns the name of a user, or the number if /etc/passwd does not have it.
pub fn user_name(uid: u32) -> String {
    name(uid, "/etc/passwd")
}

pub fn group_name(gid: u32) -> String {
    name(gid, "/etc/group")
}

fn name(id: u32, file: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    find_name(&id.to_string(), &text)
}

/// Both files have the name in the first field and the number in the third.
fn find_name(id: &str, text: &str) -> String {
    let name = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id).then(|| name.to_owned())
    };
    text.lines().find_map(name).unwrap_or_else(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names() {
        let passwd =
            "root:x:0:0:root:/root:/bin/bash\n# a comment\n\nana:x:1000:1000::/home/ana:/bin/sh\n";
        for (uid, name) in [("0", "root"), ("1000", "ana"), ("7", "7")] {
            assert_eq!(find_name(uid, passwd), name);
        }
        assert_eq!(user_name(0), "root");
        assert_eq!(group_name(0), "root");
        assert_eq!(user_name(4_000_000_000), "4000000000");
    }
}
