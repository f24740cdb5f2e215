//! Reads and writes the names and values of forms and queries.

use percent_encoding::percent_decode_str;

use crate::text::percent_encoded;

/// The fields of a query or of a form: `a=b&c=d`, in the WHATWG's encoding.
#[derive(Clone, Debug, Default)]
pub struct Form(pub Vec<(String, String)>);

impl Form {
    pub fn parse(text: &str) -> Self {
        let decode = |text: &str| {
            percent_decode_str(&text.replace('+', " "))
                .decode_utf8_lossy()
                .into_owned()
        };
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let decode_pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        };
        Self(pairs.map(decode_pair).collect())
    }

    /// The first value of a name; empty if there is none.
    pub fn get(&self, name: &str) -> &str {
        self.all(name).next().unwrap_or("")
    }

    /// The first value without the spaces around it, cut to so many characters.
    pub fn text(&self, name: &str, most: usize) -> String {
        self.get(name).trim().chars().take(most).collect()
    }

    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.pairs()
            .filter(move |(known, _)| *known == name)
            .map(|(_, value)| value)
    }
}

/// A path with a query of the fields that are not empty.
pub fn link<'a>(
    path: &str,
    fields: impl IntoIterator<Item = (&'a str, impl AsRef<str>)>,
) -> String {
    let fields = fields
        .into_iter()
        .filter(|(_, value)| !value.as_ref().is_empty());
    let pairs = fields.map(|(name, value)| format!("{name}={}", percent_encoded(value.as_ref())));
    let query = pairs.collect::<Vec<_>>().join("&");
    if query.is_empty() {
        path.to_owned()
    } else {
        format!("{path}?{query}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_back() {
        let form = Form::parse("a=1&b=x+y%20z&a=2&c&=d&&e=%zz%4&f=%C3%A9%ff");
        assert_eq!(
            (form.get("a"), form.get("b"), form.get("c")),
            ("1", "x y z", "")
        );
        assert_eq!(form.all("a").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(
            (form.get("e"), form.get("f"), form.get("nothing")),
            ("%zz%4", "é\u{fffd}", "")
        );
        for text in ["", "plain", "a b&c=d+e%", "é☂\"<>\r\n\0"] {
            let link = link("/", [("y", "1"), ("x", text)]);
            assert_eq!(Form::parse(link.trim_start_matches("/?")).get("x"), text);
        }
    }
}
