//! The wire: bytes to requests, responses to bytes. Nothing here knows of sockets or of the API's
//! format.

pub mod body;
pub mod head;
pub mod reader;
mod request;
pub mod response;
mod syntax;

pub use head::RequestHead;
pub use reader::{ReadStep, Reader};
pub use request::{ClientInfo, Request};
pub use response::Response;
pub use syntax::{MAX_BODY, MAX_HEAD, Malformed};
