pub mod error; pub mod id; pub mod http; pub mod listener;
pub mod config;
pub mod store;
