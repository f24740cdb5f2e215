//! What a key may do.

use crate::error::{ApiError, Failure, FailureCause};
use crate::store::Permission;

pub fn check(permissions: &[Permission]) -> Result<(), Failure> {
    if permissions.contains(&Permission::Completions) {
        return Ok(());
    }
    Err(Failure::new(
        ApiError::InsufficientPermission,
        FailureCause::Permission,
        "This API key may not run completions. Use one that has the permission.",
    ))
}
