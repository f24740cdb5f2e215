//! The style sheet, the script and the icon. Their paths contain a hash, so browsers can cache them
//! for good.

use std::sync::LazyLock;

use sha2::{Digest, Sha256};

use crate::http::{RequestHead, Response};

pub static STYLE: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new(
        "style",
        "css",
        "text/css; charset=utf-8",
        include_str!("style.css"),
    )
});
pub static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new(
        "script",
        "js",
        "text/javascript; charset=utf-8",
        include_str!("script.js"),
    )
});
pub static ICON: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("icon", "svg", "image/svg+xml", include_str!("icon.svg")));

pub struct Asset {
    pub path: String,
    content_type: &'static str,
    content: &'static str,
}

impl Asset {
    fn new(name: &str, extension: &str, content_type: &'static str, content: &'static str) -> Self {
        let hash = hex::encode(&Sha256::digest(content)[..8]);
        Self {
            path: format!("/assets/{name}-{hash}.{extension}"),
            content_type,
            content,
        }
    }
}

pub fn find(head: &RequestHead) -> Option<Response> {
    let is_asked =
        |file: &&Asset| file.path == head.path() && matches!(head.method(), "GET" | "HEAD");
    let file = [&*STYLE, &*SCRIPT, &*ICON].into_iter().find(is_asked)?;
    let response = Response::new(200, file.content_type, file.content.as_bytes().to_vec())
        .with("cache-control", "public, max-age=31536000, immutable")
        .with("content-security-policy", "default-src 'none'")
        .with("x-content-type-options", "nosniff")
        .with("cross-origin-resource-policy", "same-origin");
    Some(response)
}
