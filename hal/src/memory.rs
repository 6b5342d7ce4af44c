//! Main memory: of the machine, and in use by this process.

use crate::cgroup;
use crate::cpu::text::{field, kilobytes};
use crate::system::System;

/// Main memory as this process finds it, in bytes; what is not known is `None`, which on systems other than Linux is all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Memory {
    /// Physical memory of the machine (`MemTotal`).
    pub total: Option<u64>,
    /// The least limit that a control group puts on this process.
    pub limit: Option<u64>,
    /// What can be allocated without swapping and without going over a limit: `MemAvailable`, or what is left of a
    /// control group's limit if that is less. File pages count as available, since the kernel gives them up first.
    pub available: Option<u64>,
}

impl Memory {
    /// Asks the system. Values change all the time; ask again before deciding on them.
    pub fn detect() -> Self {
        Self::read(&System::this())
    }

    pub(crate) fn read(system: &System) -> Self {
        let info = system.read("/proc/meminfo").unwrap_or_default();
        let value = |key| field(&info, key).and_then(kilobytes);
        let limits: Vec<_> = cgroup::memory_limits(system).collect();
        let left = limits.iter().map(|limit| limit.left);
        Self {
            total: value("MemTotal"),
            limit: limits.iter().map(|limit| limit.bytes).min(),
            available: left.chain(value("MemAvailable")).min(),
        }
    }
}

/// Physical memory that this process occupies now, in bytes (`VmRSS`), mapped files included; `None` where the system
/// does not say.
pub fn resident() -> Option<u64> {
    status(&System::this(), "VmRSS")
}

/// The most physical memory that this process has occupied so far, in bytes (`VmHWM`).
pub fn peak_resident() -> Option<u64> {
    status(&System::this(), "VmHWM")
}

fn status(system: &System, key: &str) -> Option<u64> {
    kilobytes(field(&system.read("/proc/self/status")?, key)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Tree;

    const MEMINFO: &str =
        "MemTotal:       24684092 kB\nMemFree:        23905168 kB\nMemAvailable:   24258192 kB\n";

    #[test]
    fn without_groups_the_machine_counts() {
        let tree = Tree::new(&[("proc/meminfo", MEMINFO)]);
        let memory = Memory::read(&tree.system());
        assert_eq!(memory.total, Some(24_684_092 << 10));
        assert_eq!(memory.limit, None);
        assert_eq!(memory.available, Some(24_258_192 << 10));
    }

    #[test]
    fn the_tightest_group_counts() {
        let tree = Tree::new(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/pod/box\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/pod/box/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/pod/memory.current", "6442450944\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 1\nactive_file 1073741824\ninactive_file 0\n"),
        ]);
        let memory = Memory::read(&tree.system());
        assert_eq!(memory.limit, Some(8 << 30));
        assert_eq!(memory.available, Some(3 << 30));
    }

    #[test]
    fn nothing_known_is_none() {
        let tree = Tree::new(&[("proc/meminfo", "MemTotal: lots\nMemAvailable:\n")]);
        assert_eq!(Memory::read(&tree.system()), Memory::default());
        assert_eq!(status(&tree.system(), "VmRSS"), None);
    }

    #[test]
    fn resident_memory_is_read_where_the_system_says_it() {
        let tree =
            Tree::new(&[("proc/self/status", "Name:\tskep\nVmHWM:\t    1616 kB\nVmRSS:\t    1500 kB\n")]);
        assert_eq!(status(&tree.system(), "VmRSS"), Some(1500 << 10));
        assert_eq!(status(&tree.system(), "VmHWM"), Some(1616 << 10));
    }
}
