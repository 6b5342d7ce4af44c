//! `skep doctor`: what this machine offers, and the reason for each "no".

use crate::failure::Failure;
use skep_hal::Pool;
use skep_hal::cpu::Cpu;
use skep_hal::gpu::{Device, cuda, emulated};
use skep_quant::Isa;
use std::time::Duration;

/// Explains devices, instruction sets and memory, and the reason for each "no"
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also measure memory bandwidth
    #[arg(long)]
    measure: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let cpu = Cpu::detect();
    let unknown = || "unknown".to_owned();
    let line = |label: &str, value: String| println!("{label:<14} {value}");
    let count = |count: Option<usize>| count.map_or_else(unknown, |count| count.to_string());

    line("processor", cpu.brand.clone().unwrap_or_else(unknown));
    let quota = cpu.quota.map_or(String::new(), |quota| format!(", quota of {quota} processors"));
    line("cores", format!("{} physical, {} logical{quota}", count(cpu.physical), count(cpu.logical)));
    line("threads", format!("{} by default", cpu.default_threads()));
    line("features", cpu.features.to_string());
    match Isa::detect() {
        Ok(isa) => line("kernels", isa.name().to_owned()),
        Err(error) => line("kernels", format!("none: {error}")),
    }
    for isa in Isa::ALL.iter().filter(|isa| !isa.is_supported()) {
        line("", format!("no {}: this processor lacks it", isa.name()));
    }
    if let Some(cache) = cpu.last_level_cache() {
        line("cache", format!("{:.0} MiB last level", cache as f64 / f64::from(1 << 20)));
    }
    let gib = |bytes: Option<u64>| {
        bytes.map_or_else(unknown, |bytes| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64))
    };
    let limit = cpu.memory.limit.map_or(String::new(), |limit| format!(", limited to {}", gib(Some(limit))));
    line("memory", format!("{}, {} available{limit}", gib(cpu.memory.total), gib(cpu.memory.available)));
    if args.measure {
        let pool = Pool::new(cpu.default_threads()).map_err(|error| Failure::other(error.to_string()))?;
        let read = crate::bench::memory_speed(&pool, Duration::from_secs(1))?;
        line("bandwidth", format!("{:.1} GB/s read by {} threads", read / 1e9, pool.threads()));
    }
    println!();
    line("cpu", "yes".to_owned());
    match cuda::list() {
        Err(error) => line("cuda", format!("no: {error}")),
        Ok(found) => {
            for card in found {
                match cuda::open(card.ordinal) {
                    Ok(device) => describe("cuda", &device),
                    Err(error) => line("cuda", format!("no: {error}")),
                }
            }
        }
    }
    line("hip", "no: this build has no driver for it".to_owned());
    match emulated::open(&emulated::Options::default()) {
        Ok(device) => describe("emulated", &device),
        Err(error) => line("emulated", format!("no: {error}")),
    }
    Ok(())
}

/// What there is to say of a device.
fn describe(kind: &str, device: &Device) {
    let driver = device.driver();
    let caps = driver.caps();
    println!("{kind:<14} yes: {}, {} ({})", driver.device_name(), caps.arch, driver.version());
    match driver.memory() {
        Ok(memory) => {
            let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
            println!("{:<14} {:.1} GiB of memory, {:.1} GiB free", "", gib(memory.total), gib(memory.free));
        }
        Err(error) => println!("{:<14} memory unknown: {error}", ""),
    }
    println!(
        "{:<14} {} units, waves of {}, byte products {:?}, matrix form {:?}{}",
        "",
        caps.units,
        caps.wave,
        caps.dot4,
        caps.matrix,
        if caps.integrated { ", memory of the host" } else { "" }
    );
    match device.module(&skep_engine::KERNELS) {
        Ok(_) => println!("{:<14} kernels load", ""),
        Err(error) => println!("{:<14} kernels do not load: {error}", ""),
    }
}
