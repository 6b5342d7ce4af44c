//! Every kernel of every instruction set against the scalar truth.
#![cfg(feature = "std")]

mod invariance;
mod parallel;
mod products;
mod samples;
mod vectors;

use skep_quant::Isa;
use skep_quant::cpu::Kernels;

/// The kernels that this machine can run.
fn kernels() -> Vec<Kernels> {
    Isa::ALL.iter().filter_map(|isa| Kernels::of(*isa).ok()).collect()
}
