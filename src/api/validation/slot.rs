//! Reads JSON into what a place in the document takes, and refuses everything else in words of our own.
//!
//! `serde`'s words for a wrong type repeat the text that was sent; these name its kind only. Nothing is
//! allocated for a value that is not wanted.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A number as it was written: with a fraction or an exponent, or without.
#[derive(Clone, Copy, Debug)]
pub enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Integer(number) => number as f64,
            Self::Float(number) => number,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => number.fmt(f),
            // As JSON would have it: 1e300 and not its three hundred digits.
            Self::Float(number) => match serde_json::Number::from_f64(*number) {
                Some(number) => number.fmt(f),
                None => number.fmt(f),
            },
        }
    }
}

/// A place in the document. A kind of value that it says nothing about is refused.
pub trait Slot<'de>: Sized {
    type Value;

    /// What the place takes, in words, after it was sent something else.
    fn refusal(&self, sent: &dyn fmt::Display) -> String;

    fn null(self) -> Result<Self::Value, String> {
        Err(self.refusal(&"null"))
    }

    fn boolean(self, value: bool) -> Result<Self::Value, String> {
        Err(self.refusal(&value))
    }

    fn number(self, number: Number) -> Result<Self::Value, String> {
        Err(self.refusal(&number))
    }

    fn text(self, _: Cow<'de, str>) -> Result<Self::Value, String> {
        Err(self.refusal(&"a string"))
    }

    fn array<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        Err(A::Error::custom(self.refusal(&"an array")))
    }

    fn object<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
        Err(A::Error::custom(self.refusal(&"an object")))
    }
}

/// Makes `serde` fill a slot.
pub struct Fill<S>(pub S);

impl<'de, S: Slot<'de>> DeserializeSeed<'de> for Fill<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: Slot<'de>> Visitor<'de> for Fill<S> {
    type Value = S::Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0.refusal(&"something else"))
    }

    fn visit_unit<E: Error>(self) -> Result<S::Value, E> {
        self.0.null().map_err(E::custom)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<S::Value, E> {
        self.0.boolean(value).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<S::Value, E> {
        self.0.number(Number::Integer(number.into())).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<S::Value, E> {
        self.0.number(Number::Integer(number.into())).map_err(E::custom)
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<S::Value, E> {
        self.0.number(Number::Float(number)).map_err(E::custom)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<S::Value, E> {
        self.0.text(Cow::Owned(text.to_owned())).map_err(E::custom)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<S::Value, E> {
        self.0.text(Cow::Borrowed(text)).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<S::Value, A::Error> {
        self.0.array(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<S::Value, A::Error> {
        self.0.object(members)
    }
}

/// The name of a member.
pub struct Name;

impl<'de> Slot<'de> for Name {
    type Value = Cow<'de, str>;

    fn refusal(&self, sent: &dyn fmt::Display) -> String {
        format!("A member's name must be a string, not {sent}.")
    }

    fn text(self, text: Cow<'de, str>) -> Result<Self::Value, String> {
        Ok(text)
    }
}
