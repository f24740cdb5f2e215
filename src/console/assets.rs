//! The style sheet, the script and the icon. Their paths contain a hash, so browsers can cache them for good.

use sha2::{Digest, Sha256};

use crate::http::{RequestHead, Response};

pub struct Assets {
    pub style: Asset,
    pub script: Asset,
    pub icon: Asset,
}

pub struct Asset {
    pub path: String,
    content_type: &'static str,
    content: &'static str,
}

impl Asset {
    fn new(name: &str, extension: &str, content_type: &'static str, content: &'static str) -> Self {
        let hash = hex::encode(&Sha256::digest(content)[..8]);
        Self { path: format!("/assets/{name}-{hash}.{extension}"), content_type, content }
    }
}

impl Assets {
    pub fn new() -> Self {
        Self {
            style: Asset::new("style", "css", "text/css; charset=utf-8", include_str!("style.css")),
            script: Asset::new("script", "js", "text/javascript; charset=utf-8", include_str!("script.js")),
            icon: Asset::new("icon", "svg", "image/svg+xml", include_str!("icon.svg")),
        }
    }

    /// Returns the file of a path, if it is one of these.
    pub fn find(&self, head: &RequestHead) -> Option<Response> {
        if !matches!(head.method(), "GET" | "HEAD") {
            return None;
        }
        let file =
            [&self.style, &self.script, &self.icon].into_iter().find(|file| file.path == head.path())?;
        let response = Response::new(200, file.content_type, file.content.as_bytes().to_vec())
            .with("cache-control", "public, max-age=31536000, immutable")
            .with("content-security-policy", "default-src 'none'")
            .with("x-content-type-options", "nosniff")
            .with("cross-origin-resource-policy", "same-origin");
        Some(response)
    }
}
