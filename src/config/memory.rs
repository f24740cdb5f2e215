//! The default of `buffer_limit`: a part of the memory that this process may use.

use std::fs;
use std::path::Path;

use rustix::system::sysinfo;

const MIB: u64 = 1024 * 1024;

/// A quarter of the memory limit, from 4 to 64 MiB.
pub fn default_buffer_limit() -> u64 {
    let system = sysinfo();
    let total = system.totalram.saturating_mul(system.mem_unit.into());
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = memory_limit(total, &groups, Path::new("/sys/fs/cgroup"));
    (limit / 4).clamp(4 * MIB, 64 * MIB)
}

/// The smallest of the host's memory and the limits of this process's control groups and all of
/// their parents. Each line of `groups` is an id, the controllers and the path of a group; version
/// 2 names no controllers.
fn memory_limit(total: u64, groups: &str, mounted: &Path) -> u64 {
    let group_limit = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (folder, file) = match controllers {
            "" => (mounted.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mounted.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        // In a container the path may be the host's, and only the root is mounted: it is among the
        // parents.
        Path::new(path)
            .ancestors()
            .map(|group| {
                folder
                    .join(group.strip_prefix("/").unwrap_or(group))
                    .join(file)
            })
            .filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
            .min()
    };
    groups.lines().filter_map(group_limit).fold(total, u64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_all_groups_counts() {
        let root =
            std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            fs::create_dir_all(file.parent().expect("a folder"))
                .expect("the folder should be made");
            fs::write(file, text).expect("the file should be written");
        };
        write("memory.max", "900\n");
        write("a/memory.max", "500\n");
        write("a/b/memory.max", "max\n");
        write("a/c/memory.max", "400\n");
        write("memory/memory.limit_in_bytes", "800\n");
        write("memory/x/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/x/y/memory.limit_in_bytes", "300\n");
        for (groups, total, limit) in [
            ("", 1000, 1000),
            ("0::/\n", 1000, 900),
            ("0::/\n", 100, 100),
            ("0::/a/b\n", 1000, 500),
            ("0::/a/c\n", 1000, 400),
            ("0::/of/the/host\n", 1000, 900),
            (
                "5:cpu,cpuacct:/x/y\n4:memory:/x\n1:name=systemd:/\n",
                1000,
                800,
            ),
            ("4:hugetlb,memory:/x/y\n0::/a\n", 1000, 300),
            ("nonsense", 1000, 1000),
        ] {
            assert_eq!(memory_limit(total, groups, &root), limit, "{groups:?}");
        }
        fs::remove_dir_all(&root).expect("it should go");
        assert!((4 * MIB..=64 * MIB).contains(&default_buffer_limit()));
    }
}
