//! The speed of encoding an image, against the f32 arithmetic of the machine.

use super::{Args, FMA_TIME, median, pool};
use crate::failure::Failure;
use serde::Serialize;
use skep_engine::{ImageEncoder, Picture, Precision};
use skep_hal::bandwidth::fma_peak;
use std::path::Path;
use std::time::Instant;

/// How fast a projector encodes.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    projector: String,
    threads: usize,
    /// Soft tokens of the image.
    tokens: usize,
    /// Multiplications and additions of its matrix products.
    operations: f64,
    /// Median of the repetitions.
    seconds: f64,
    samples: Vec<f64>,
    flops: f64,
    /// Largest rate of f32 multiply-adds measured between the repetitions, and by which instructions.
    pub(super) fma_peak_flops: f64,
    fma_isa: &'static str,
    fma_share: f64,
}

/// Whether a file is a projector rather than a model.
pub(super) fn is_projector(path: &Path) -> bool {
    // What cannot be read is for the loader to explain.
    skep_gguf::open(path).is_ok_and(|file| file.architecture().is_ok_and(|name| name == "clip"))
}

/// Encodes a made-up picture of the asked number of soft tokens.
pub(super) fn measure(path: &Path, args: &Args) -> Result<Report, Failure> {
    let precision = if args.model.exact { Precision::Exact } else { Precision::Fast };
    let mut encoder = ImageEncoder::load(path, args.model.threads, precision)?;
    let budget = args.model.image_tokens();
    let picture = picture(budget.tokens())?;
    let tokens = encoder.soft_tokens(&picture, budget)?;
    let operations = encoder.operations(&picture, budget)?;
    let pool = pool(args)?;
    let mut peak = fma_peak(&pool, FMA_TIME);
    let mut samples = Vec::new();
    for _ in 0..args.repeat {
        let start = Instant::now();
        encoder.encode(&picture, budget)?;
        samples.push(start.elapsed().as_secs_f64());
        // Between the repetitions, so that both see the same machine.
        let other = fma_peak(&pool, FMA_TIME);
        if other.flops_per_second > peak.flops_per_second {
            peak = other;
        }
    }
    let seconds = median(&samples);
    let flops = operations / seconds;
    Ok(Report {
        projector: path.display().to_string(),
        threads: encoder.threads(),
        tokens,
        operations,
        seconds,
        samples,
        flops,
        fma_peak_flops: peak.flops_per_second,
        fma_isa: peak.isa,
        fma_share: flops / peak.flops_per_second,
    })
}

/// A picture that takes exactly this many tokens of 48x48 pixels without being resized, as square as can be.
fn picture(tokens: usize) -> Result<Picture, Failure> {
    let rows = (1..=tokens).filter(|rows| rows * rows <= tokens && tokens.is_multiple_of(*rows)).max();
    let rows = rows.unwrap_or(1);
    let (width, height) = (tokens / rows * 48, rows * 48);
    let rgb = (0..width * height * 3).map(|i| (i * 7919 % 251) as u8).collect();
    Picture::new(width, height, rgb).map_err(|error| Failure::other(error.to_string()))
}

impl Report {
    pub(super) fn print(&self) {
        let low = self.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.samples.iter().copied().fold(0.0, f64::max);
        println!("projector        {} ({} threads)", self.projector, self.threads);
        println!(
            "image {:<4}       {:8.2} s   ({low:.2} to {high:.2}), {:.0} GFLOP/s",
            self.tokens,
            self.seconds,
            self.flops / 1e9
        );
        println!(
            "image arithmetic {:.0} % of {:.0} GFLOP/s ({})",
            self.fma_share * 100.0,
            self.fma_peak_flops / 1e9,
            self.fma_isa
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::Budget;

    #[test]
    fn pictures_take_the_tokens_they_are_made_for() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
        let path = models.join("tiny-gemma4-mmproj-bf16.gguf");
        assert!(is_projector(&path) && !is_projector(&models.join("tiny-gemma4-Q4_K_M.gguf")));
        let mut encoder = ImageEncoder::load(&path, Some(2), Precision::Fast).unwrap();
        for budget in Budget::ALL {
            let picture = picture(budget.tokens()).unwrap();
            assert_eq!(encoder.soft_tokens(&picture, budget).unwrap(), budget.tokens());
        }
        let budget = Budget::new(70).unwrap();
        let picture = picture(70).unwrap();
        // 630 patches of 768 numbers, 4 blocks of 128 and 256, projection to 256.
        let (n, width, ff) = (630.0, 128.0, 256.0);
        let block = 4.0 * width * width + 3.0 * width * ff + 2.0 * n * width;
        let expected = 2.0 * (n * (width * 768.0 + 4.0 * block) + 70.0 * width * 256.0);
        assert_eq!(encoder.operations(&picture, budget).unwrap(), expected);
        assert_eq!(encoder.encode(&picture, budget).unwrap().len(), 70 * 256);
    }
}
