use crate::cpu::Cpu;
use crate::{Buffer, Pool, Result, Scope};
use core::fmt;
use core::hint::black_box;
use core::time::Duration;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The least buffer, so that systems that do not tell their caches are measured beyond them too.
const LEAST_BYTES: u64 = 1 << 30;
/// Buffer size over size of the last-level cache. What is left of one pass in the cache is overwritten by the next.
const CACHES: u64 = 4;
/// The buffer takes no more than this fraction of the available memory.
const SHARE: u64 = 4;
/// Bytes of a chunk: tens to hundreds of microseconds, and whole huge pages.
const CHUNK: usize = 4 << 20;
const WORDS: usize = CHUNK / size_of::<u64>();

/// The rate at which a pool reads main memory in order, and how it was measured.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ReadBandwidth {
    /// Bytes per second of the best pass.
    pub bytes_per_second: f64,
    /// Size of the buffer that each pass read in full.
    pub buffer_bytes: u64,
    /// Size of the last-level cache as the system reports it.
    pub cache_bytes: Option<u64>,
    /// Participants.
    pub threads: usize,
    /// Passes made.
    pub passes: usize,
}

impl ReadBandwidth {
    /// Whether the buffer was at least twice the last-level cache, so that the rate is that of memory; `None` where the
    /// cache's size is not known. False means that available memory was too small for such a buffer.
    pub fn beyond_cache(&self) -> Option<bool> {
        self.cache_bytes.map(|cache| self.buffer_bytes >= cache.saturating_mul(2))
    }
}

impl fmt::Display for ReadBandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        write!(f, "{:.1} GB/s read", self.bytes_per_second / 1e9)?;
        write!(
            f,
            " (threads {}, best of {} passes over {:.2} GiB",
            self.threads,
            self.passes,
            gib(self.buffer_bytes)
        )?;
        match self.cache_bytes {
            Some(cache) => write!(f, " = {:.1} x last-level cache)", gib(self.buffer_bytes) / gib(cache)),
            None => f.write_str(", cache size unknown)"),
        }
    }
}

/// Measures how fast all participants of `pool` together read main memory.
///
/// Each pass sums a buffer of `max(1 GiB, 4 x last-level cache)`, or a quarter of the available memory if that is less;
/// passes go on until `budget` is spent, at least three of them, and the best one counts. Allocating and filling the
/// buffer comes on top, about half a second per GiB and thread.
///
/// # Errors
///
/// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory) if there is no memory for the buffer.
pub fn read_bandwidth(pool: &Pool, budget: Duration) -> Result<ReadBandwidth> {
    let cpu = Cpu::detect();
    let cache_bytes = cpu.last_level_cache();
    let mut buffer = Buffer::zeroed(buffer_words(cache_bytes, cpu.memory.available))?;
    Ok(pool.enter(|scope| {
        fill(scope, &mut buffer);
        let measured = measure(scope, &buffer, budget);
        black_box(measured.sum);
        ReadBandwidth {
            bytes_per_second: buffer.bytes() as f64 / measured.best.as_secs_f64(),
            buffer_bytes: buffer.bytes() as u64,
            cache_bytes,
            threads: scope.workers(),
            passes: measured.passes,
        }
    }))
}

/// Length of the buffer, in whole chunks.
fn buffer_words(cache: Option<u64>, available: Option<u64>) -> usize {
    let wanted = cache.unwrap_or(0).saturating_mul(CACHES).max(LEAST_BYTES);
    let bytes = wanted.min(available.unwrap_or(u64::MAX) / SHARE);
    let chunks = usize::try_from(bytes.div_ceil(CHUNK as u64)).unwrap_or(usize::MAX / CHUNK);
    chunks.max(1) * WORDS
}

/// Writes every page: untouched ones are all the kernel's one page of zeros, which the cache holds.
fn fill(scope: &Scope<'_>, words: &mut [u64]) {
    let chunks: Vec<Mutex<&mut [u64]>> = words.chunks_mut(WORDS).map(Mutex::new).collect();
    scope.run(chunks.len(), &|index| {
        let mut chunk = chunks[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let first = (index * WORDS) as u64;
        for (word, position) in chunk.iter_mut().zip(first..) {
            *word = pattern(position);
        }
    });
}

/// Different on every page, lest the kernel merge pages.
fn pattern(position: u64) -> u64 {
    position.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

struct Measured {
    best: Duration,
    passes: usize,
    /// Sum of all words, wrapping, the same in each pass.
    sum: u64,
}

fn measure(scope: &Scope<'_>, words: &[u64], budget: Duration) -> Measured {
    let sum_words = fastest_sum();
    let chunks: Vec<&[u64]> = words.chunks(WORDS).collect();
    let mut measured = Measured { best: Duration::MAX, passes: 0, sum: 0 };
    let started = Instant::now();
    while measured.passes < 3 || started.elapsed() < budget {
        let total = AtomicU64::new(0);
        let pass = Instant::now();
        scope.run(chunks.len(), &|index| {
            total.fetch_add(sum_words(chunks[index]), Ordering::Relaxed);
        });
        measured.best = measured.best.min(pass.elapsed());
        measured.passes += 1;
        measured.sum = total.into_inner();
    }
    measured
}

fn fastest_sum() -> fn(&[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return |words| {
            // SAFETY: the processor has AVX2.
            unsafe { sum_avx2(words) }
        };
    }
    sum
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    sum(words)
}

/// Adds up with 32 accumulators, which is 8 vectors of AVX2, so that no load waits for an addition.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    let (blocks, rest) = words.as_chunks::<32>();
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |sum, word| sum.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right_at_any_length() {
        let words: Vec<u64> = (0..1000).map(pattern).collect();
        for len in [0, 1, 31, 32, 33, 64, 999, 1000] {
            let expected = words[..len].iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
            assert_eq!(sum(&words[..len]), expected, "{len} words");
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has AVX2.
                assert_eq!(unsafe { sum_avx2(&words[..len]) }, expected, "{len} words");
            }
        }
    }

    #[test]
    fn a_pass_reads_every_word_that_was_filled_in() {
        let mut buffer = Buffer::<u64>::zeroed(3 * WORDS + 5).unwrap();
        let expected =
            (0..buffer.len() as u64).fold(0_u64, |sum, position| sum.wrapping_add(pattern(position)));
        for threads in [1, 3] {
            Pool::new(threads).unwrap().enter(|scope| {
                fill(scope, &mut buffer);
                let measured = measure(scope, &buffer, Duration::ZERO);
                assert_eq!((measured.passes, measured.sum), (3, expected));
                assert!(measured.best > Duration::ZERO);
            });
        }
    }

    #[test]
    fn the_buffer_outgrows_the_cache_but_not_the_memory() {
        let mib = |words: usize| words >> 17;
        assert_eq!(mib(buffer_words(Some(32 << 20), Some(64 << 30))), 1024);
        assert_eq!(mib(buffer_words(Some(300 << 20), Some(64 << 30))), 1200);
        assert_eq!(mib(buffer_words(Some(300 << 20), Some(2 << 30))), 512);
        assert_eq!(mib(buffer_words(None, None)), 1024);
        assert_eq!(mib(buffer_words(Some(1 << 20), Some(0))), 4);
    }

    #[test]
    fn the_conditions_are_told() {
        let mut rate = ReadBandwidth {
            bytes_per_second: 18.52e9,
            buffer_bytes: 1 << 30,
            cache_bytes: Some(256 << 20),
            threads: 2,
            passes: 7,
        };
        assert_eq!(
            rate.to_string(),
            "18.5 GB/s read (threads 2, best of 7 passes over 1.00 GiB = 4.0 x last-level cache)"
        );
        assert_eq!(rate.beyond_cache(), Some(true));
        rate.cache_bytes = Some(600 << 20);
        assert_eq!(rate.beyond_cache(), Some(false));
        rate.cache_bytes = None;
        assert_eq!(rate.beyond_cache(), None);
        assert!(rate.to_string().ends_with("GiB, cache size unknown)"));
    }
}
