//! Tables for people.

/// Lays out rows in columns, with numbers aligned to the right. The heading has a comma between two
/// columns.
pub fn with_heading(heading: &str, rows: impl Iterator<Item = Vec<String>>) -> String {
    let heading = heading.split(',').map(str::to_owned).collect();
    lay_out(&[heading].into_iter().chain(rows).collect::<Vec<_>>())
}

/// The same for rows of which the first is the heading.
pub fn lay_out(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths_and_numbers: Vec<(usize, bool)> = (0..columns)
        .map(|column| {
            let cells = || rows.iter().map(|row| row[column].as_str());
            let width = cells().map(|cell| cell.chars().count()).max().unwrap_or(0);
            (width, has_numbers(cells().skip(1)))
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths_and_numbers)
            .map(|(cell, &(width, is_numeric))| match is_numeric {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Returns true if the cells are numbers. A dash or an empty cell is a missing number; a date is
/// not a number.
fn has_numbers<'a>(cells: impl Iterator<Item = &'a str>) -> bool {
    let mut cells = cells.filter(|cell| !matches!(*cell, "" | "-")).peekable();
    cells.peek().is_some()
        && cells.all(|cell| {
            cell.bytes()
                .all(|b| b.is_ascii_digit() || b == b',' || b == b'.')
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<const N: usize>(rows: &[[&str; N]], text: &str) {
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.map(String::from).to_vec())
            .collect();
        assert_eq!(lay_out(&rows), text);
    }

    #[test]
    fn columns_line_up() {
        check(&[["a", "b"], ["één", "x"]], "a    b\néén  x\n");
    }

    #[test]
    fn numbers_are_aligned_to_the_right() {
        check(
            &[
                ["day", "n", "share", "id"],
                ["2026-01-01", "1,234", "0.5", "7"],
                ["2026-01-02", "-", "", "x"],
            ],
            "day             n  share  id\n2026-01-01  1,234    0.5  7\n2026-01-02      -         x\n",
        );
        check(&[["none"], ["-"]], "none\n-\n");
    }
}
