//! The processor, as far as this process may use it.
//!
//! See [`Cpu`].

pub(crate) mod text;

use crate::cgroup;
use crate::memory::Memory;
use crate::system::System;
use core::fmt;
use std::collections::BTreeSet;
use text::CacheFiles;

/// What there is to compute with.
///
/// On Linux this is read from `/proc` and `/sys`; elsewhere only the number of logical processors and the instruction
/// sets are known. Nothing here fails: what the system does not say, or says in a way not understood, is `None`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Cpu {
    /// The processor's name; on some ARM systems that of the board.
    pub brand: Option<String>,
    /// Logical processors (hardware threads) that the affinity mask allows and that are online.
    pub logical: Option<usize>,
    /// Physical cores to which those belong.
    pub physical: Option<usize>,
    /// Processors' worth of time that a control group (version 1 or 2) allows, such as 1.5; `None` without a quota.
    pub quota: Option<f64>,
    /// Instruction set extensions.
    pub features: Features,
    /// Caches of the allowed processors, by level.
    pub caches: Vec<Cache>,
    /// Main memory.
    pub memory: Memory,
}

impl Cpu {
    /// Asks the system.
    pub fn detect() -> Self {
        let mut cpu = Self::read(&System::this());
        if cpu.logical.is_none() {
            cpu.logical = std::thread::available_parallelism().ok().map(usize::from);
        }
        cpu
    }

    fn read(system: &System) -> Self {
        let cpuinfo = system.read("/proc/cpuinfo").unwrap_or_default();
        let allowed = allowed(system).unwrap_or_default();
        Self {
            brand: text::brand(&cpuinfo),
            logical: Some(allowed.len()).filter(|&count| count != 0),
            physical: cores(system, &allowed).or_else(|| text::cores(&cpuinfo, &allowed)),
            quota: cgroup::cpu_quota(system),
            features: Features::detect(&cpuinfo),
            caches: caches(system, &allowed),
            memory: Memory::read(system),
        }
    }

    /// How many threads to compute with: the physical cores, or the logical processors where those are not known, but no
    /// more than the quota pays for in full. At least 1.
    ///
    /// Inference waits for memory most of the time, which a second thread on a core does not make faster.
    pub fn default_threads(&self) -> usize {
        let cores = self.physical.or(self.logical).unwrap_or(1);
        // The cast rounds down and saturates.
        let paid = self.quota.map_or(usize::MAX, |quota| quota as usize);
        cores.min(paid).max(1)
    }

    /// Bytes of the last-level data or unified cache, all instances that the allowed processors have together.
    pub fn last_level_cache(&self) -> Option<u64> {
        let data = self.caches.iter().filter(|cache| cache.kind != CacheKind::Instruction);
        data.max_by_key(|cache| cache.level).map(|cache| cache.total_bytes)
    }
}

/// Caches of one level and kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cache {
    /// Distance from the core, from 1.
    pub level: u8,
    /// What it holds.
    pub kind: CacheKind,
    /// Bytes of one instance, the largest if they differ.
    pub bytes: u64,
    /// Separate instances that the allowed processors have.
    pub instances: usize,
    /// Bytes of all instances together. Virtual machines often report the whole of a cache that they share with others.
    pub total_bytes: u64,
}

/// What a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CacheKind {
    /// Data.
    Data,
    /// Instructions.
    Instruction,
    /// Both.
    Unified,
}

/// Instruction set extensions that matter to the kernels. Displays as a list of the names of those present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Features {
    /// AVX2: 256-bit integers.
    pub avx2: bool,
    /// FMA3: fused multiply-add on 256 bits.
    pub fma: bool,
    /// F16C: conversion between f16 and f32.
    pub f16c: bool,
    /// AVX-512 foundation.
    pub avx512f: bool,
    /// AVX-512 on bytes and words.
    pub avx512bw: bool,
    /// AVX-512 on 128 and 256 bits.
    pub avx512vl: bool,
    /// AVX-512 VNNI: 8-bit integer dot products.
    pub avx512vnni: bool,
    /// AVX-VNNI: the same in VEX encoding.
    pub avxvnni: bool,
    /// AMX tiles with 8-bit integer products, known to the kernel; a process must still ask it for leave. Linux only.
    pub amx_int8: bool,
    /// Advanced SIMD of 64-bit ARM.
    pub neon: bool,
}

impl Features {
    fn detect(cpuinfo: &str) -> Self {
        let mut features =
            Self { amx_int8: text::has_flags(cpuinfo, &["amx_tile", "amx_int8"]), ..Self::default() };
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        {
            features.avx2 = std::arch::is_x86_feature_detected!("avx2");
            features.fma = std::arch::is_x86_feature_detected!("fma");
            features.f16c = std::arch::is_x86_feature_detected!("f16c");
            features.avx512f = std::arch::is_x86_feature_detected!("avx512f");
            features.avx512bw = std::arch::is_x86_feature_detected!("avx512bw");
            features.avx512vl = std::arch::is_x86_feature_detected!("avx512vl");
            features.avx512vnni = std::arch::is_x86_feature_detected!("avx512vnni");
            features.avxvnni = std::arch::is_x86_feature_detected!("avxvnni");
        }
        #[cfg(target_arch = "aarch64")]
        {
            features.neon = std::arch::is_aarch64_feature_detected!("neon");
        }
        features
    }

    fn named(&self) -> [(&'static str, bool); 10] {
        [
            ("avx2", self.avx2),
            ("fma", self.fma),
            ("f16c", self.f16c),
            ("avx512f", self.avx512f),
            ("avx512bw", self.avx512bw),
            ("avx512vl", self.avx512vl),
            ("avx512vnni", self.avx512vnni),
            ("avxvnni", self.avxvnni),
            ("amx_int8", self.amx_int8),
            ("neon", self.neon),
        ]
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let present: Vec<&str> =
            self.named().into_iter().filter(|&(_, present)| present).map(|(name, _)| name).collect();
        f.write_str(&present.join(" "))
    }
}

/// Processors that the affinity mask allows and that are online.
fn allowed(system: &System) -> Option<BTreeSet<u32>> {
    let status = system.read("/proc/self/status")?;
    let allowed = text::cpu_list(text::field(&status, "Cpus_allowed_list")?)?;
    let online = system.read("/sys/devices/system/cpu/online").and_then(|list| text::cpu_list(&list));
    Some(match online {
        Some(online) => &allowed & &online,
        None => allowed,
    })
}

/// Cores of the given processors by their lists of siblings; `None` unless each has one.
fn cores(system: &System, cpus: &BTreeSet<u32>) -> Option<usize> {
    let mut firsts = BTreeSet::new();
    for cpu in cpus {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        let siblings = system
            .read(format!("{topology}/core_cpus_list"))
            .or_else(|| system.read(format!("{topology}/thread_siblings_list")))?;
        firsts.insert(text::cpu_list(&siblings)?.first().copied()?);
    }
    Some(firsts.len()).filter(|&count| count != 0)
}

fn caches(system: &System, cpus: &BTreeSet<u32>) -> Vec<Cache> {
    let mut seen = BTreeSet::new();
    for cpu in cpus {
        for index in 0.. {
            let directory = format!("/sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
            let read = |name| system.read(format!("{directory}/{name}"));
            let Some(level) = read("level") else {
                break;
            };
            if let (Some(kind), Some(size), Some(shared)) =
                (read("type"), read("size"), read("shared_cpu_list"))
            {
                seen.extend(CacheFiles::new(&level, &kind, &size, &shared));
            }
        }
    }
    text::caches(&seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Tree;

    /// Two cores of two threads each; the mask leaves out the last thread, and one allowed processor is offline.
    const SYSTEM: &[(&str, &str)] = &[
        ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Test CPU @ 2 GHz\nflags\t: amx_tile amx_int8\n"),
        ("proc/self/status", "Name:\tx\nCpus_allowed:\t17\nCpus_allowed_list:\t0-2,4\n"),
        ("proc/self/cgroup", "0::/a/b\n"),
        ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1,3\n"),
        ("sys/devices/system/cpu/cpu2/topology/core_cpus_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
        ("sys/devices/system/cpu/cpu0/cache/index0/type", "Instruction\n"),
        ("sys/devices/system/cpu/cpu0/cache/index0/size", "32K\n"),
        ("sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu0/cache/index1/level", "2\n"),
        ("sys/devices/system/cpu/cpu0/cache/index1/type", "Unified\n"),
        ("sys/devices/system/cpu/cpu0/cache/index1/size", "1024K\n"),
        ("sys/devices/system/cpu/cpu0/cache/index1/shared_cpu_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu1/cache/index0/level", "2\n"),
        ("sys/devices/system/cpu/cpu1/cache/index0/type", "Unified\n"),
        ("sys/devices/system/cpu/cpu1/cache/index0/size", "2048K\n"),
        ("sys/devices/system/cpu/cpu1/cache/index0/shared_cpu_list", "1,3\n"),
    ];

    #[test]
    fn a_system_is_read() {
        let tree = Tree::new(SYSTEM);
        let cpu = Cpu::read(&tree.system());
        assert_eq!(cpu.brand.as_deref(), Some("Test CPU @ 2 GHz"));
        assert_eq!(cpu.logical, Some(3));
        assert_eq!(cpu.physical, Some(2));
        assert_eq!(cpu.quota, Some(1.5));
        assert!(cpu.features.amx_int8);
        assert_eq!(cpu.last_level_cache(), Some(3 << 20));
        assert_eq!(cpu.default_threads(), 1);
    }

    #[test]
    fn nothing_known_is_none_and_one_thread() {
        let tree = Tree::new(&[]);
        let cpu = Cpu::read(&tree.system());
        assert_eq!((cpu.brand.as_deref(), cpu.logical, cpu.physical, cpu.quota), (None, None, None, None));
        assert_eq!((cpu.caches.len(), cpu.last_level_cache()), (0, None));
        assert_eq!(cpu.memory, Memory::default());
        assert_eq!(cpu.default_threads(), 1);
    }

    #[test]
    fn threads_follow_cores_and_quota() {
        let tree = Tree::new(&[]);
        let mut cpu = Cpu::read(&tree.system());
        let mut threads = |physical, logical, quota| {
            (cpu.physical, cpu.logical, cpu.quota) = (physical, logical, quota);
            cpu.default_threads()
        };
        assert_eq!(threads(Some(8), Some(16), None), 8);
        assert_eq!(threads(None, Some(16), None), 16);
        assert_eq!(threads(Some(8), Some(16), Some(3.9)), 3);
        assert_eq!(threads(Some(8), Some(16), Some(0.5)), 1);
        assert_eq!(threads(Some(8), Some(16), Some(1e30)), 8);
    }

    #[test]
    fn this_machine_is_read() {
        let cpu = Cpu::detect();
        let logical = cpu.logical.expect("std knows on every system that runs tests");
        assert!(cpu.default_threads() <= logical);
        if cfg!(target_os = "linux") {
            assert!(
                cpu.memory.total > cpu.memory.available && cpu.memory.available > Some(0),
                "{:?}",
                cpu.memory
            );
            assert!(cpu.physical.is_none_or(|cores| cores <= logical));
        }
        if cfg!(target_arch = "x86_64") {
            assert!(cpu.features.avx2 || !cpu.features.avx512f);
        }
    }

    #[test]
    fn features_are_listed_by_name() {
        let features = Features { avx2: true, fma: true, avxvnni: true, ..Features::default() };
        assert_eq!(features.to_string(), "avx2 fma avxvnni");
        assert_eq!(Features::default().to_string(), "");
    }
}
