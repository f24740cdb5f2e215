//! A database in the place of another: a backup is restored, or everything is moved to PostgreSQL.

pub mod moving;
pub mod restore;
