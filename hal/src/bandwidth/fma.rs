use crate::Pool;
use core::fmt;
use core::hint::black_box;
use core::time::Duration;
use std::time::Instant;

/// Rounds of one chunk: a fraction of a millisecond.
const ROUNDS: u32 = 40_000;

/// The rate of f32 arithmetic without any memory access.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct FmaPeak {
    /// Additions and multiplications per second, two per multiply-add, of the best pass.
    pub flops_per_second: f64,
    /// Participants.
    pub threads: usize,
    /// Instruction set used: `avx512f`, `avx2+fma`, `neon`, or `scalar` for what the compiler makes of plain Rust.
    pub isa: &'static str,
}

impl fmt::Display for FmaPeak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gflops = self.flops_per_second / 1e9;
        write!(f, "{gflops:.0} GFLOP/s f32 (threads {}, {})", self.threads, self.isa)
    }
}

/// Measures how many f32 multiply-adds all participants of `pool` together do, in the widest vectors that the processor
/// has. Passes of about two milliseconds go on until `budget` is spent; the best one counts.
pub fn fma_peak(pool: &Pool, budget: Duration) -> FmaPeak {
    let kernel = Kernel::widest();
    let chunks = 4 * pool.threads();
    let mut best = Duration::MAX;
    pool.enter(|scope| {
        let started = Instant::now();
        loop {
            let pass = Instant::now();
            scope.run(chunks, &|_| {
                black_box((kernel.run)(black_box(0.5), ROUNDS));
            });
            best = best.min(pass.elapsed());
            if started.elapsed() >= budget {
                break;
            }
        }
    });
    let operations = chunks as f64 * f64::from(ROUNDS) * kernel.operations as f64;
    FmaPeak { flops_per_second: operations / best.as_secs_f64(), threads: pool.threads(), isa: kernel.isa }
}

#[derive(Clone, Copy)]
struct Kernel {
    isa: &'static str,
    /// Additions and multiplications of one round.
    operations: usize,
    /// Each accumulator goes through `x = x * factor + 1` for a number of rounds; the sum of all of them.
    run: fn(f32, u32) -> f32,
}

impl Kernel {
    fn widest() -> Self {
        Self::all().last().copied().unwrap_or(SCALAR)
    }

    /// Those that the processor can run, the widest last.
    fn all() -> Vec<Self> {
        #[allow(unused_mut, reason = "nothing is added on other processors")]
        let mut kernels = vec![SCALAR];
        #[cfg(target_arch = "x86_64")]
        kernels.extend(x86::kernels());
        #[cfg(target_arch = "aarch64")]
        kernels.extend(arm::kernels());
        kernels
    }
}

const SCALAR: Kernel = Kernel { isa: "scalar", operations: 2 * LANES, run: scalar };
const LANES: usize = 32;

fn scalar(factor: f32, rounds: u32) -> f32 {
    let mut x = [0.0; LANES];
    for _ in 0..rounds {
        for x in &mut x {
            *x = *x * factor + 1.0;
        }
    }
    x.iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Kernel;
    use core::arch::x86_64::*;

    pub(super) fn kernels() -> impl Iterator<Item = Kernel> {
        let avx2 = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
        let avx512 = std::arch::is_x86_feature_detected!("avx512f");
        let avx2 = avx2.then_some(Kernel {
            isa: "avx2+fma",
            operations: 2 * 8 * AVX2,
            run: |factor, rounds| {
                // SAFETY: the processor has AVX2 and FMA.
                unsafe { fma_avx2(factor, rounds) }
            },
        });
        let avx512 = avx512.then_some(Kernel {
            isa: "avx512f",
            operations: 2 * 16 * AVX512,
            run: |factor, rounds| {
                // SAFETY: the processor has AVX-512F.
                unsafe { fma_avx512(factor, rounds) }
            },
        });
        avx2.into_iter().chain(avx512)
    }

    /// Accumulators: more than latency times units (4 x 2, 5 x 2), fewer than registers (16, 32).
    const AVX2: usize = 12;
    const AVX512: usize = 20;

    #[target_feature(enable = "avx2,fma")]
    fn fma_avx2(factor: f32, rounds: u32) -> f32 {
        let (factor, one) = (_mm256_set1_ps(factor), _mm256_set1_ps(1.0));
        let mut x = [_mm256_setzero_ps(); AVX2];
        for _ in 0..rounds {
            for x in &mut x {
                *x = _mm256_fmadd_ps(*x, factor, one);
            }
        }
        let mut sum = _mm256_setzero_ps();
        for x in x {
            sum = _mm256_add_ps(sum, x);
        }
        let half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
    }

    #[target_feature(enable = "avx512f")]
    fn fma_avx512(factor: f32, rounds: u32) -> f32 {
        let (factor, one) = (_mm512_set1_ps(factor), _mm512_set1_ps(1.0));
        let mut x = [_mm512_setzero_ps(); AVX512];
        for _ in 0..rounds {
            for x in &mut x {
                *x = _mm512_fmadd_ps(*x, factor, one);
            }
        }
        let mut sum = _mm512_setzero_ps();
        for x in x {
            sum = _mm512_add_ps(sum, x);
        }
        _mm512_reduce_add_ps(sum)
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::Kernel;
    use core::arch::aarch64::*;

    pub(super) fn kernels() -> impl Iterator<Item = Kernel> {
        let neon = std::arch::is_aarch64_feature_detected!("neon");
        let kernel = Kernel {
            isa: "neon",
            operations: 2 * 4 * NEON,
            run: |factor, rounds| {
                // SAFETY: the processor has Advanced SIMD.
                unsafe { fma_neon(factor, rounds) }
            },
        };
        neon.then_some(kernel).into_iter()
    }

    /// Accumulators: latency times units (4 x 4) and a few more, of 32 registers.
    const NEON: usize = 20;

    #[target_feature(enable = "neon")]
    fn fma_neon(factor: f32, rounds: u32) -> f32 {
        let (factor, one) = (vdupq_n_f32(factor), vdupq_n_f32(1.0));
        let mut x = [vdupq_n_f32(0.0); NEON];
        for _ in 0..rounds {
            for x in &mut x {
                *x = vfmaq_f32(one, *x, factor);
            }
        }
        let mut sum = vdupq_n_f32(0.0);
        for x in x {
            sum = vaddq_f32(sum, x);
        }
        vaddvq_f32(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// x = x / 2 + 1 from 0 is 2 - 2^(1 - rounds), exactly in f32 for so few rounds.
    #[test]
    fn every_kernel_does_all_the_arithmetic_it_counts() {
        for kernel in Kernel::all() {
            let lanes = kernel.operations as f32 / 2.0;
            for rounds in [0, 1, 2, 5, 10] {
                let expected = lanes * (2.0 - 2.0 / 2_f32.powi(rounds));
                assert_eq!((kernel.run)(0.5, rounds as u32), expected, "{} {rounds}", kernel.isa);
            }
        }
    }

    #[test]
    fn a_short_measurement() {
        let peak = fma_peak(&Pool::new(2).unwrap(), Duration::ZERO);
        assert!(peak.flops_per_second.is_finite() && peak.flops_per_second > 0.0);
        assert_eq!((peak.threads, peak.isa), (2, Kernel::widest().isa));
        let peak = FmaPeak { flops_per_second: 314.4e9, threads: 2, isa: "avx2+fma" };
        assert_eq!(peak.to_string(), "314 GFLOP/s f32 (threads 2, avx2+fma)");
    }
}
