//! `skep bench`: speed of prefill, decode and image encoding, beside the limits of the machine.

mod image;

use crate::failure::Failure;
use crate::model::ModelArgs;
use crate::random::Random;
use serde::Serialize;
use skep_engine::{Batch, Piece, Runner, SequenceId, Want};
use skep_hal::{Cpu, Pool};
use std::time::{Duration, Instant};

/// Measures prefill, decode and image encoding, beside the machine's memory bandwidth and arithmetic
///
/// With a projector (mmproj file) as the model, image encoding alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt lengths to prefill
    #[arg(short = 'p', long, value_name = "N,...", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Tokens to decode, one at a time
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    generate: usize,
    /// Tokens already in the context before a measurement
    #[arg(short = 'd', long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Sequences that decode together
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1")]
    batch: Vec<usize>,
    /// Repetitions; the median counts
    #[arg(short = 'r', long, value_name = "N", default_value_t = 3, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=100))]
    repeat: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How long each measurement of the bandwidth and of arithmetic lasts.
const BANDWIDTH_TIME: Duration = Duration::from_millis(500);
const FMA_TIME: Duration = Duration::from_millis(100);

/// One measurement.
#[derive(Debug, Serialize)]
struct Row {
    test: String,
    sequences: usize,
    tokens_per_second: f64,
    /// Of each repetition.
    samples: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    threads: usize,
    isa: String,
    file_bytes: u64,
    load_seconds: f64,
    active_bytes_per_token: u64,
    read_bandwidth_bytes_per_second: f64,
    /// Before and after the model.
    read_bandwidth_samples: Vec<f64>,
    prefill_tokens_per_second: Option<f64>,
    decode_tokens_per_second: Option<f64>,
    decode_bandwidth_share: Option<f64>,
    resident_bytes: Option<u64>,
    peak_resident_bytes: Option<u64>,
    rows: Vec<Row>,
    /// Largest rate of f32 multiply-adds measured, in operations per second, and by which instructions.
    fma_peak_flops: f64,
    fma_isa: &'static str,
    image: Option<image::Report>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let longest = args.prompt.iter().copied().max().unwrap_or(0).max(args.generate);
    let sequences = args.batch.iter().copied().max().unwrap_or(1);
    if args.batch.contains(&0) || args.prompt.contains(&0) {
        return Err(Failure::usage("--prompt and --batch take numbers above 0"));
    }
    if image::is_projector(args.model.file()) {
        let report = image::measure(args.model.file(), args)?;
        match args.json {
            true => println!("{}", json(&report)?),
            false => report.print(),
        }
        return Ok(());
    }
    // Before and after the model, not beside it: the measurement's own buffer must not add to the memory of the model.
    let mut bandwidth = vec![read_bandwidth(args)?];
    let start = Instant::now();
    let mut runner = args.model.load(|options| {
        options.context.get_or_insert((args.depth + longest).max(1));
        options.sequences = sequences;
    })?;
    let load_seconds = start.elapsed().as_secs_f64();
    let mut report = measure(&mut runner, args, load_seconds)?;
    let sees_images = runner.info().images.is_some();
    drop(runner);
    bandwidth.push(read_bandwidth(args)?);
    report.limit(bandwidth);
    if let Some(projector) = args.model.projector().filter(|_| sees_images) {
        report.image = Some(image::measure(&projector, args)?);
    }
    let peak = skep_hal::bandwidth::fma_peak(&pool(args)?, FMA_TIME);
    let image = report.image.as_ref().map_or(0.0, |image| image.fma_peak_flops);
    (report.fma_peak_flops, report.fma_isa) = (peak.flops_per_second.max(image), peak.isa);
    if args.json {
        println!("{}", json(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn json(report: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(report).map_err(|error| Failure::other(error.to_string()))
}

fn measure(runner: &mut Runner, args: &Args, load_seconds: f64) -> Result<Report, Failure> {
    let mut rows: Vec<Row> = Vec::new();
    // Repetitions are interleaved, so that a machine whose speed drifts moves all measurements.
    for repetition in 0..args.repeat {
        let mut row = 0;
        let mut note = |test: String, sequences, sample: f64| {
            if repetition == 0 {
                rows.push(Row { test, sequences, tokens_per_second: 0.0, samples: Vec::new() });
            }
            rows[row].samples.push(sample);
            row += 1;
        };
        for &tokens in &args.prompt {
            let seconds = prefill(runner, args.depth, tokens)?;
            note(format!("pp{tokens}"), 1, tokens as f64 / seconds);
        }
        for &sequences in args.batch.iter().filter(|_| args.generate > 0) {
            let seconds = decode(runner, args.depth, args.generate, sequences)?;
            note(format!("tg{}", args.generate), sequences, (args.generate * sequences) as f64 / seconds);
        }
    }
    for row in &mut rows {
        row.tokens_per_second = median(&row.samples);
    }
    let info = runner.info();
    let first = |prefix: &str| {
        let row = rows.iter().find(|row| row.test.starts_with(prefix) && row.sequences == 1)?;
        Some(row.tokens_per_second)
    };
    Ok(Report {
        model: info.name.clone(),
        threads: info.threads,
        isa: info.isa.clone(),
        file_bytes: info.file_bytes,
        load_seconds,
        active_bytes_per_token: info.active_bytes_per_token,
        read_bandwidth_bytes_per_second: 0.0,
        read_bandwidth_samples: Vec::new(),
        prefill_tokens_per_second: first("pp"),
        decode_tokens_per_second: first("tg"),
        decode_bandwidth_share: None,
        resident_bytes: skep_hal::memory::resident(),
        peak_resident_bytes: skep_hal::memory::peak_resident(),
        rows,
        fma_peak_flops: 0.0,
        fma_isa: "",
        image: None,
    })
}

impl Report {
    /// Sets the speed against the larger of the bandwidths measured around it.
    fn limit(&mut self, bandwidth: Vec<f64>) {
        let read = bandwidth.iter().copied().fold(0.0, f64::max);
        let bytes = self.active_bytes_per_token as f64;
        self.decode_bandwidth_share = self.decode_tokens_per_second.map(|speed| speed * bytes / read);
        self.read_bandwidth_bytes_per_second = read;
        self.read_bandwidth_samples = bandwidth;
    }
}

/// Bytes per second that as many threads as the model gets read from memory.
fn read_bandwidth(args: &Args) -> Result<f64, Failure> {
    memory_speed(&pool(args)?, BANDWIDTH_TIME)
}

/// As many threads as the model gets.
fn pool(args: &Args) -> Result<Pool, Failure> {
    let threads = args.model.threads.unwrap_or_else(|| Cpu::detect().default_threads());
    Pool::new(threads).map_err(|error| Failure::other(error.to_string()))
}

/// Bytes per second that the workers of a pool read from memory.
pub(crate) fn memory_speed(pool: &Pool, time: Duration) -> Result<f64, Failure> {
    let measured = skep_hal::bandwidth::read_bandwidth(pool, time);
    Ok(measured.map_err(|error| Failure::other(error.to_string()))?.bytes_per_second)
}

/// Tokens that differ, from a fixed seed, so that routing differs too.
fn tokens(count: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() % vocab as u64) as u32).collect()
}

/// Seconds to run `count` tokens of prompt after `depth` others.
fn prefill(runner: &mut Runner, depth: usize, count: usize) -> Result<f64, Failure> {
    let ids = tokens(depth + count, runner.info().n_vocab, 1);
    let sequence = runner.open()?;
    feed(runner, sequence, &ids[..depth], Want::Nothing)?;
    let start = Instant::now();
    feed(runner, sequence, &ids[depth..], Want::Last)?;
    let seconds = start.elapsed().as_secs_f64();
    runner.close(sequence);
    Ok(seconds)
}

fn feed(runner: &mut Runner, sequence: SequenceId, ids: &[u32], last: Want) -> Result<(), Failure> {
    const CHUNK: usize = 512;
    let chunks = ids.chunks(CHUNK);
    let count = chunks.len();
    for (index, chunk) in chunks.enumerate() {
        let want = if index + 1 == count { last } else { Want::Nothing };
        runner.step(&Batch::of(sequence, chunk, want))?;
    }
    Ok(())
}

/// Seconds to decode `count` tokens in each of several sequences of `depth` tokens.
fn decode(runner: &mut Runner, depth: usize, count: usize, sequences: usize) -> Result<f64, Failure> {
    let vocab = runner.info().n_vocab;
    let mut members = Vec::new();
    for member in 0..sequences {
        let ids = tokens(depth + count, vocab, 2 + member as u64);
        let sequence = runner.open()?;
        feed(runner, sequence, &ids[..depth], Want::Nothing)?;
        members.push((sequence, ids));
    }
    let start = Instant::now();
    for position in depth..depth + count {
        let mut batch = Batch::new();
        for (sequence, ids) in &members {
            batch.push(Piece {
                sequence: *sequence,
                tokens: &ids[position..=position],
                images: &[],
                want: Want::Last,
            });
        }
        runner.step(&batch)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    for (sequence, _) in members {
        runner.close(sequence);
    }
    Ok(seconds)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

fn print(report: &Report) {
    let gb = |bytes: f64| bytes / 1e9;
    println!("model            {} ({:.2} GB)", report.model, gb(report.file_bytes as f64));
    println!("threads, isa     {}, {}", report.threads, report.isa);
    println!("loaded in        {:.2} s", report.load_seconds);
    println!("active weights   {:.1} MB per token", report.active_bytes_per_token as f64 / 1e6);
    println!("read bandwidth   {:.1} GB/s", gb(report.read_bandwidth_bytes_per_second));
    println!("f32 arithmetic   {:.0} GFLOP/s ({})", report.fma_peak_flops / 1e9, report.fma_isa);
    for row in &report.rows {
        let low = row.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let high = row.samples.iter().copied().fold(0.0, f64::max);
        println!(
            "{:<8} x{:<6} {:8.2} tok/s   ({low:.2} to {high:.2})",
            row.test, row.sequences, row.tokens_per_second
        );
    }
    if let Some(share) = report.decode_bandwidth_share {
        println!("decode reads     {:.0} % of the bandwidth", share * 100.0);
    }
    if let Some(resident) = report.resident_bytes {
        println!("memory           {:.2} GB resident", gb(resident as f64));
    }
    if let Some(image) = &report.image {
        image.print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn bench_tokens_are_in_the_vocabulary_and_differ() {
        let ids = tokens(1000, 50, 1);
        assert!(ids.iter().all(|&id| id < 50));
        assert!((0..50).all(|id| ids.contains(&id)));
    }
}
