//! What control groups (Linux, versions 1 and 2) allow this process.

use crate::system::System;
use std::path::{Component, Path, PathBuf};

/// Processors' worth of time per unit of time, the least over this process's groups; `None` without a quota.
pub(crate) fn cpu_quota(system: &System) -> Option<f64> {
    groups(system, "cpu")
        .filter_map(|group| match group.version {
            Version::One => {
                quota_v1(&group.read(system, "cpu.cfs_quota_us")?, &group.read(system, "cpu.cfs_period_us")?)
            }
            Version::Two => quota_v2(&group.read(system, "cpu.max")?),
        })
        .min_by(f64::total_cmp)
}

/// A memory limit and what is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    pub(crate) bytes: u64,
    /// Not in use, or in use for file pages that the kernel gives up first.
    pub(crate) left: u64,
}

/// The limits of all of this process's groups, the root's included.
pub(crate) fn memory_limits(system: &System) -> impl Iterator<Item = MemoryLimit> {
    groups(system, "memory").filter_map(|group| {
        let (limit, usage) = match group.version {
            Version::One => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Version::Two => ("memory.max", "memory.current"),
        };
        let bytes = limit_bytes(&group.read(system, limit)?)?;
        let used = group.read(system, usage).and_then(|text| text.trim().parse().ok()).unwrap_or(0_u64);
        let files = group.read(system, "memory.stat").map_or(0, |text| file_pages(&text));
        Some(MemoryLimit { bytes, left: bytes.saturating_sub(used.saturating_sub(files)) })
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// One group, as a directory.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    directory: PathBuf,
}

impl Group {
    fn read(&self, system: &System, file: &str) -> Option<String> {
        system.read(self.directory.join(file))
    }
}

fn groups(system: &System, controller: &str) -> impl Iterator<Item = Group> {
    let membership = system.read("/proc/self/cgroup").unwrap_or_default();
    let mounts = system.read("/proc/self/mountinfo").unwrap_or_default();
    group_directories(&membership, &mounts, controller).into_iter()
}

/// The groups that bind a process for one controller: its own and all above, as far as they are mounted.
fn group_directories(membership: &str, mounts: &str, controller: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version = if hierarchy == "0" && controllers.is_empty() {
            Version::Two
        } else if controllers.split(',').any(|one| one == controller) {
            Version::One
        } else {
            continue;
        };
        let Some(mount) = mounts.lines().find_map(|line| Mount::parse(line, version, controller)) else {
            continue;
        };
        groups.extend(mount.levels(path).map(|directory| Group { version, directory }));
    }
    groups
}

struct Mount {
    /// The group that is mounted.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Reads a line of `/proc/self/mountinfo` (see proc(5)) if it mounts the hierarchy in question.
    fn parse(line: &str, version: Version, controller: &str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let (kind, options) = (file_system.next()?, file_system.nth(1)?);
        let wanted = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|option| option == controller),
            Version::Two => kind == "cgroup2",
        };
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        wanted.then(|| Self { root: unescape(root).into(), point: unescape(point).into() })
    }

    /// Directories from the group `path` up to the mounted one. Where the path does not lie below what is mounted, as in
    /// containers that share the host's naming, the mounted one is the best there is.
    fn levels(&self, path: &str) -> impl Iterator<Item = PathBuf> {
        let below = Path::new(path).strip_prefix(&self.root).unwrap_or(Path::new(""));
        let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        let below = if plain { below.to_owned() } else { PathBuf::new() };
        let levels: Vec<PathBuf> = below.ancestors().map(|level| self.point.join(level)).collect();
        levels.into_iter()
    }
}

/// Undoes the octal escapes of mountinfo.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// `cpu.max`: quota, or `max`, and period, in microseconds.
fn quota_v2(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

fn quota_v1(quota: &str, period: &str) -> Option<f64> {
    ratio(quota.trim(), period.trim())
}

fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
    (quota != 0 && period != 0).then(|| quota as f64 / period as f64)
}

/// A limit in bytes; `max`, and the page counts near 2^63 with which version 1 says the same, are none.
fn limit_bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|&bytes: &u64| bytes < 1 << 60)
}

/// Bytes of file pages on the kernel's lists of reclaimable ones, the group's descendants included.
fn file_pages(stat: &str) -> u64 {
    let value = |key: &str| {
        stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    let sum = |active, inactive| Some(value(active)?.saturating_add(value(inactive)?));
    sum("total_active_file", "total_inactive_file")
        .or_else(|| sum("active_file", "inactive_file"))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOUNTS_V2: &str = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
        31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const MOUNTS_V1: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro,relatime master:9 - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory\\040here rw - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    fn directories(membership: &str, mounts: &str, controller: &str) -> Vec<String> {
        let groups = group_directories(membership, mounts, controller);
        groups
            .iter()
            .map(|group| group.directory.to_str().unwrap().trim_end_matches('/').to_owned())
            .collect()
    }

    #[test]
    fn version_2_walks_up_to_the_root() {
        assert_eq!(
            directories("0::/user.slice/job\n", MOUNTS_V2, "cpu"),
            ["/sys/fs/cgroup/user.slice/job", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"]
        );
        assert_eq!(directories("0::/\n", MOUNTS_V2, "memory"), ["/sys/fs/cgroup"]);
        assert_eq!(directories("0::/../../other\n", MOUNTS_V2, "memory"), ["/sys/fs/cgroup"]);
    }

    #[test]
    fn version_1_finds_its_controller_and_the_mounted_part() {
        let membership = "5:memory:/job\n4:cpu,cpuacct:/docker/abc/inner\n3:cpuset:/x\n0::/\n";
        assert_eq!(
            directories(membership, MOUNTS_V1, "cpu"),
            ["/sys/fs/cgroup/cpu,cpuacct/inner", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/unified"]
        );
        assert_eq!(
            directories("5:memory:/job\n", MOUNTS_V1, "memory"),
            ["/sys/fs/cgroup/memory here/job", "/sys/fs/cgroup/memory here"]
        );
        // The host's name of the group, seen from a container.
        assert_eq!(
            directories("4:cpu,cpuacct:/kube/pod\n", MOUNTS_V1, "cpu"),
            ["/sys/fs/cgroup/cpu,cpuacct"]
        );
        assert!(directories(membership, MOUNTS_V2, "cpuset").iter().all(|dir| dir == "/sys/fs/cgroup"));
        assert!(directories("nonsense\n\n::\n", MOUNTS_V1, "cpu").is_empty());
    }

    #[test]
    fn quotas() {
        assert_eq!(quota_v2("150000 100000\n"), Some(1.5));
        assert_eq!(quota_v2("max 100000\n"), None);
        assert_eq!(quota_v2("100000\n"), None);
        assert_eq!(quota_v2("0 0"), None);
        assert_eq!(quota_v1("-1\n", "100000\n"), None);
        assert_eq!(quota_v1("800000\n", "100000\n"), Some(8.0));
    }

    #[test]
    fn limits() {
        assert_eq!(limit_bytes("4294967296\n"), Some(1 << 32));
        assert_eq!(limit_bytes("max\n"), None);
        assert_eq!(limit_bytes("9223372036854771712\n"), None);
        assert_eq!(file_pages("anon 5\nactive_file 100\ninactive_file 20\n"), 120);
        assert_eq!(
            file_pages("active_file 1\ninactive_file 2\ntotal_active_file 10\ntotal_inactive_file 30\n"),
            40
        );
        assert_eq!(file_pages(""), 0);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[-0-9:/. a-z,\\\\\n]{0,120}") {
            let _ = group_directories(&text, MOUNTS_V2, "cpu");
            let _ = group_directories("4:cpu:/a/b\n0::/c\n", &text, "cpu");
            let _ = quota_v2(&text);
            let _ = limit_bytes(&text);
            let _ = file_pages(&text);
        }
    }
}
