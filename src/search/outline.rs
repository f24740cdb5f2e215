//! A document as its headings divide it.

/// A document's title, if it has one, and the text under each of its headings.
#[derive(Debug, Default)]
pub struct Outline {
    pub title: String,
    pub sections: Vec<Section>,
}

#[derive(Debug)]
pub struct Section {
    /// Empty before the first heading.
    pub heading: String,
    pub text: String,
}

impl Outline {
    /// Adds a section, unless it is empty.
    pub fn push(&mut self, heading: String, text: &str) {
        let text = text.trim().to_owned();
        if !heading.is_empty() || !text.is_empty() {
            self.sections.push(Section { heading, text });
        }
    }
}
