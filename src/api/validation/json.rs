//! Reads JSON into the type that each place in the document accepts, with error messages of our
//! own.
//!
//! `serde`'s messages for a wrong type repeat the text that was sent; these name only its kind.
//! Nothing is allocated for a value that is not wanted.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Number;

/// A value that was sent. Of an array or an object, only the kind is known.
pub enum Json<'de> {
    Null,
    Boolean(bool),
    Number(Number),
    Text(Cow<'de, str>),
    Array,
    Object,
}

/// The value in an error message: itself if it is short, else its kind.
impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Boolean(value) => value.fmt(f),
            Self::Number(number) => number.fmt(f),
            Self::Text(_) => f.write_str("a string"),
            Self::Array => f.write_str("an array"),
            Self::Object => f.write_str("an object"),
        }
    }
}

/// Parses the value of a member. A function of a [`Json`] accepts neither array nor object.
pub trait MemberParser<'de>: Sized {
    type Value;

    /// Parses any value. The error says what is accepted instead.
    fn parse(self, sent: Json<'de>) -> Result<Self::Value, String>;

    fn array<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.parse(Json::Array).map_err(A::Error::custom)
    }

    fn object<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        self.parse(Json::Object).map_err(A::Error::custom)
    }
}

impl<'de, T, F: FnOnce(Json<'de>) -> Result<T, String>> MemberParser<'de> for F {
    type Value = T;

    fn parse(self, sent: Json<'de>) -> Result<T, String> {
        self(sent)
    }
}

/// Makes `serde` run a parser.
pub struct Seed<P>(pub P);

impl<'de, P: MemberParser<'de>> Seed<P> {
    fn parse<E: Error>(self, sent: Json<'de>) -> Result<P::Value, E> {
        self.0.parse(sent).map_err(E::custom)
    }
}

impl<'de, P: MemberParser<'de>> DeserializeSeed<'de> for Seed<P> {
    type Value = P::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<P::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, P: MemberParser<'de>> Visitor<'de> for Seed<P> {
    type Value = P::Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<P::Value, E> {
        self.parse(Json::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<P::Value, E> {
        self.parse(Json::Boolean(value))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<P::Value, E> {
        self.parse(Json::Number(number.into()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<P::Value, E> {
        self.parse(Json::Number(number.into()))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<P::Value, E> {
        let number =
            Number::from_f64(number).ok_or_else(|| E::custom("A number must be finite."))?;
        self.parse(Json::Number(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<P::Value, E> {
        self.parse(Json::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<P::Value, E> {
        self.parse(Json::Text(Cow::Borrowed(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<P::Value, A::Error> {
        self.0.array(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<P::Value, A::Error> {
        self.0.object(members)
    }
}
