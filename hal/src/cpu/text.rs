//! Readers of what Linux says about processors, as functions of text.

use super::{Cache, CacheKind};
use std::collections::{BTreeMap, BTreeSet};

/// More processors than any system has; a longer list is damaged.
const MAX_CPUS: u32 = 1 << 16;

/// A list of processor numbers such as `0-3,8,10-11`.
pub(crate) fn cpu_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// The value of the first `key: value` line, as in `/proc/self/status`, `/proc/meminfo` and `/proc/cpuinfo`.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    fields(text, key).next()
}

fn fields<'a>(text: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (name, value) = line.split_once(':')?;
        (name.trim_end() == key).then(|| value.trim())
    })
}

/// A size such as `24684092 kB`, in bytes.
pub(crate) fn kilobytes(text: &str) -> Option<u64> {
    text.strip_suffix("kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

/// The processor's name in `/proc/cpuinfo`: `model name` on x86, `Model` (the board) on some ARM systems.
pub(crate) fn brand(cpuinfo: &str) -> Option<String> {
    ["model name", "cpu model", "Model", "Hardware"]
        .into_iter()
        .find_map(|key| field(cpuinfo, key))
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
}

/// Whether the kernel lists every one of `names` among the processor's flags.
pub(crate) fn has_flags(cpuinfo: &str, names: &[&str]) -> bool {
    let flags: BTreeSet<&str> =
        field(cpuinfo, "flags").unwrap_or_default().split_ascii_whitespace().collect();
    names.iter().all(|name| flags.contains(name))
}

/// Cores among the processors `allowed`, by the package and core numbers of `/proc/cpuinfo`; `None` unless each of them
/// has both.
pub(crate) fn cores(cpuinfo: &str, allowed: &BTreeSet<u32>) -> Option<usize> {
    let mut cores = BTreeMap::new();
    for block in cpuinfo.split("\n\n") {
        let number = |key| field(block, key).and_then(|value| value.parse::<u32>().ok());
        if let (Some(cpu), Some(package), Some(core)) =
            (number("processor"), number("physical id"), number("core id"))
        {
            cores.insert(cpu, (package, core));
        }
    }
    let distinct: Option<BTreeSet<_>> = allowed.iter().map(|cpu| cores.get(cpu)).collect();
    distinct.map(|distinct| distinct.len()).filter(|&count| count != 0)
}

/// A cache size such as `307200K`, in bytes.
pub(crate) fn cache_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|&bytes| bytes != 0)
}

/// One cache as one processor sees it: the four files of a `cache/index*` directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CacheFiles {
    level: u8,
    kind: CacheKind,
    /// Processors that share it, as a list; one physical cache has one such text.
    shared_by: String,
    bytes: u64,
}

impl CacheFiles {
    pub(crate) fn new(level: &str, kind: &str, size: &str, shared_by: &str) -> Option<Self> {
        Some(Self {
            level: level.trim().parse().ok()?,
            kind: match kind.trim() {
                "Data" => CacheKind::Data,
                "Instruction" => CacheKind::Instruction,
                "Unified" => CacheKind::Unified,
                _ => return None,
            },
            shared_by: shared_by.trim().to_owned(),
            bytes: cache_size(size)?,
        })
    }
}

/// Groups what the processors see into caches, each physical one counted once.
pub(crate) fn caches(seen: &BTreeSet<CacheFiles>) -> Vec<Cache> {
    let mut caches: BTreeMap<(u8, CacheKind), Cache> = BTreeMap::new();
    for one in seen {
        let cache = caches.entry((one.level, one.kind)).or_insert(Cache {
            level: one.level,
            kind: one.kind,
            bytes: 0,
            instances: 0,
            total_bytes: 0,
        });
        cache.bytes = cache.bytes.max(one.bytes);
        cache.instances += 1;
        cache.total_bytes = cache.total_bytes.saturating_add(one.bytes);
    }
    caches.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const XEON: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 207\n\
        model name\t: Intel(R) Xeon(R) Processor\nphysical id\t: 0\ncore id\t\t: 0\ncpu cores\t: 2\n\
        flags\t\t: fpu vme avx2 amx_bf16 amx_tile amx_int8\n\n\
        processor\t: 1\nmodel name\t: Intel(R) Xeon(R) Processor\nphysical id\t: 0\ncore id\t\t: 1\n\n";
    const HYPERTHREADS: &str = "processor\t: 0\nphysical id\t: 0\ncore id\t: 0\n\nprocessor\t: 1\nphysical id\t: 0\n\
        core id\t: 0\n\nprocessor\t: 2\nphysical id\t: 1\ncore id\t: 0\n\nprocessor\t: 3\nphysical id\t: 1\ncore id\t: 0\n";
    const RASPBERRY: &str = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\n\
        CPU implementer\t: 0x41\n\nRevision\t: c04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n";

    fn set<T: Ord + Clone>(items: &[T]) -> BTreeSet<T> {
        items.iter().cloned().collect()
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("0-3,8,10-11\n"), Some(set(&[0, 1, 2, 3, 8, 10, 11])));
        assert_eq!(cpu_list("5"), Some(set(&[5])));
        assert_eq!(cpu_list("\n"), Some(BTreeSet::new()));
        for bad in ["a", "3-1", "1-", "-1", "0-4294967295", "0-99999999999", "1;2"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn names() {
        assert_eq!(brand(XEON).as_deref(), Some("Intel(R) Xeon(R) Processor"));
        assert_eq!(brand(RASPBERRY).as_deref(), Some("Raspberry Pi 5 Model B Rev 1.0"));
        assert_eq!(brand("model\t: 207\n"), None);
        assert_eq!(brand(""), None);
    }

    #[test]
    fn flags() {
        assert!(has_flags(XEON, &["amx_tile", "amx_int8"]));
        assert!(!has_flags(XEON, &["amx_tile", "amx"]));
        assert!(!has_flags(RASPBERRY, &["fp"]));
    }

    #[test]
    fn cores_are_counted_once_per_package_and_within_the_mask() {
        assert_eq!(cores(XEON, &set(&[0, 1])), Some(2));
        assert_eq!(cores(XEON, &set(&[1])), Some(1));
        assert_eq!(cores(HYPERTHREADS, &set(&[0, 1, 2, 3])), Some(2));
        assert_eq!(cores(HYPERTHREADS, &set(&[0, 1])), Some(1));
        assert_eq!(cores(HYPERTHREADS, &set(&[0, 7])), None);
        assert_eq!(cores(HYPERTHREADS, &BTreeSet::new()), None);
        assert_eq!(cores(RASPBERRY, &set(&[0])), None);
    }

    #[test]
    fn sizes() {
        assert_eq!(kilobytes("24684092 kB"), Some(24_684_092 * 1024));
        assert_eq!(kilobytes("24684092"), None);
        assert_eq!(kilobytes("99999999999999999999 kB"), None);
        assert_eq!(kilobytes("18446744073709551615 kB"), None);
        assert_eq!(cache_size("307200K\n"), Some(300 << 20));
        assert_eq!(cache_size("1M"), Some(1 << 20));
        assert_eq!(cache_size("512"), Some(512));
        for bad in ["", "K", "0K", "-1K", "1.5M", "99999999999999999999K"] {
            assert_eq!(cache_size(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_shared_cache_is_one_and_separate_ones_add_up() {
        let seen = set(&[
            CacheFiles::new("1\n", "Data\n", "48K\n", "0\n").unwrap(),
            CacheFiles::new("1", "Data", "48K", "1").unwrap(),
            CacheFiles::new("1", "Instruction", "32K", "0").unwrap(),
            CacheFiles::new("3", "Unified", "32768K", "0-7").unwrap(),
            CacheFiles::new("3", "Unified", "32768K", "0-7").unwrap(),
            CacheFiles::new("3", "Unified", "98304K", "8-15").unwrap(),
        ]);
        let caches = caches(&seen);
        let summary: Vec<_> = caches
            .iter()
            .map(|c| (c.level, c.kind, c.bytes >> 10, c.instances, c.total_bytes >> 10))
            .collect();
        assert_eq!(
            summary,
            [
                (1, CacheKind::Data, 48, 2, 96),
                (1, CacheKind::Instruction, 32, 1, 32),
                (3, CacheKind::Unified, 98304, 2, 131_072),
            ]
        );
        assert_eq!(CacheFiles::new("1", "Trace", "48K", "0"), None);
        assert_eq!(CacheFiles::new("x", "Data", "48K", "0"), None);
    }

    proptest! {
        #[test]
        fn a_written_list_reads_back(cpus in proptest::collection::btree_set(0_u32..2000, 0..40)) {
            let text = cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(cpu_list(&text), Some(cpus));
        }

        #[test]
        fn no_text_panics(text in "[-0-9,:a-zA-Z \n\tKM\u{e9}]{0,80}") {
            let _ = cpu_list(&text);
            let _ = cache_size(&text);
            let _ = kilobytes(&text);
            let _ = brand(&text);
            let _ = cores(&text, &[0].into());
            let _ = CacheFiles::new(&text, &text, &text, &text);
        }
    }
}
