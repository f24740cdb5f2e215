//! Runs the command in one arena of the allocator, and turns its result into an exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(target_env = "gnu")]
    share_one_arena();
    adriaticum::cli::main()
}

/// Lets all threads allocate from one arena. In glibc's eight arenas for each core, full bodies leave so many unused pieces
/// that the service needs half as much memory again.
#[cfg(target_env = "gnu")]
fn share_one_arena() {
    // SAFETY: the process has no other thread yet, and the call sets a number of the allocator. A failure only costs memory.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}
