//! Hit rates of a routing trace at several numbers of slots, for LRU and for the best any policy could do.
//!
//! `cargo run --release --example replay -- [TRACE]`: a file in the format of `skep_moe_cache::replay`, or without one
//! a synthetic run of 40 layers of 256 experts, 8 per token. `--write` prints that trace instead.

use std::error::Error;
use std::time::Instant;

use skep_moe_cache::Lru;
use skep_moe_cache::replay::{Belady, Synthetic, Trace, replay};

fn main() -> Result<(), Box<dyn Error>> {
    let synthetic =
        Synthetic { n_layers: 40, n_experts: 256, top_k: 8, n_tokens: 500, zipf: 0.9, repeat: 0.35, seed: 1 };
    let trace = match std::env::args().nth(1).as_deref() {
        None => Trace::synthetic(&synthetic)?,
        Some("--write") => {
            print!("{}", Trace::synthetic(&synthetic)?);
            return Ok(());
        }
        Some(file) => Trace::parse(&std::fs::read_to_string(file)?)?,
    };
    let all = trace.n_layers() * trace.n_experts();
    println!("{} steps of {} layers, {} experts", trace.steps().len(), trace.n_layers(), trace.n_experts());
    println!("{:>8} {:>7} {:>8} {:>8} {:>12}", "slots", "share", "lru", "belady", "lru ns/step");
    for percent in [5, 10, 22, 40, 62, 80, 100] {
        let n_slots = (all * percent / 100).max(1);
        let start = Instant::now();
        let lru = replay(&trace, n_slots, Lru::new());
        let nanoseconds = start.elapsed().as_nanos() / trace.steps().len().max(1) as u128;
        match lru.and_then(|lru| Ok((lru, replay(&trace, n_slots, Belady::new(&trace))?))) {
            Ok((lru, best)) => println!(
                "{n_slots:>8} {percent:>6}% {:>7.1}% {:>7.1}% {nanoseconds:>12}",
                100.0 * lru.hit_rate().unwrap_or(0.0),
                100.0 * best.hit_rate().unwrap_or(0.0),
            ),
            Err(error) => println!("{n_slots:>8} {percent:>6}% {error}"),
        }
    }
    Ok(())
}
