//! Runs the command with an allocator that keeps little memory, and turns its result into an exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(target_env = "gnu")]
    set_up_allocator();
    adriaticum::cli::main()
}

/// Starts the program again, as the same process, with settings that glibc reads before `main`, unless there are some already.
///
/// One arena for all threads: in eight for each core, full bodies leave so many unused pieces that the service needs half as
/// much memory again. In the cache of each thread no pieces above 512 bytes: 64 workers would keep 8 MiB in theirs, spread so
/// that larger pieces can't be used again.
#[cfg(target_env = "gnu")]
fn set_up_allocator() {
    use std::os::unix::process::CommandExt;
    use std::{env, process};

    const VARIABLE: &str = "GLIBC_TUNABLES";
    let mut arguments = env::args_os();
    if env::var_os(VARIABLE).is_none()
        && let (Ok(program), Some(name)) = (env::current_exe(), arguments.next())
    {
        let settings = "glibc.malloc.arena_max=1:glibc.malloc.tcache_max=512";
        // It returns only after a failure, which costs memory and no more.
        let _ = process::Command::new(program).arg0(name).args(arguments).env(VARIABLE, settings).exec();
    }
}
