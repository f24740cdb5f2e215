//! The name and the columns of a table, and statements for all of its rows.

pub struct Table {
    pub name: String,
    pub columns: Vec<String>,
    /// The columns of the primary key, in its order.
    pub key: Vec<String>,
}

impl Table {
    /// Reads all rows in the order of their key.
    pub fn select(&self) -> String {
        format!("SELECT {} FROM {} ORDER BY {}", self.columns.join(", "), self.name, self.key.join(", "))
    }

    /// Inserts this many rows.
    pub fn insert(&self, rows: usize) -> String {
        let width = self.columns.len();
        let row = |row: usize| {
            let parameters = (1..=width).map(|column| format!("${}", row * width + column));
            format!("({})", parameters.collect::<Vec<_>>().join(", "))
        };
        let rows: Vec<String> = (0..rows).map(row).collect();
        format!("INSERT INTO {} ({}) VALUES {}", self.name, self.columns.join(", "), rows.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements() {
        let words = |words: [&str; 2]| words.map(String::from).to_vec();
        let table = Table { name: "t".into(), columns: words(["a", "b"]), key: words(["b", "a"]) };
        assert_eq!(table.select(), "SELECT a, b FROM t ORDER BY b, a");
        assert_eq!(table.insert(2), "INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4)");
    }
}
