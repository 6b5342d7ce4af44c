//! `skep synth`: models of true shapes with random weights, to measure speed without a download.

mod blocks;
mod gemma;
mod plan;
mod projector;
mod qwen;

use crate::failure::Failure;
use crate::model::Bar;
use crate::random::Random;
use plan::{Content, Planned, Shapes};
use skep_gguf::{TensorType, Writer};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a seeded model of true shapes with random weights, for speed
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which model's shapes: qwen3.6-35b-a3b, gemma-4-26b-a4b, gemma-4-26b-a4b-mmproj
    #[arg(long, value_name = "NAME")]
    preset: String,
    /// Layers to write; all by default
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Mix of types: q4_k_m for models and bf16 for projectors, which are the defaults
    #[arg(long, value_name = "TYPE")]
    quant: Option<String>,
    /// Seed of the weights: the same seed writes the same file
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Skew of the routing, as the exponent of a Zipf law: 0 is uniform, trained models are near 1
    #[arg(long, value_name = "Z", default_value_t = 0.0)]
    skew: f32,
    /// The file to write
    #[arg(short = 'o', long = "out", value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (shapes, mix, routed) = preset(args)?;
    if let Some(quant) = args.quant.as_deref().filter(|quant| *quant != mix) {
        return Err(Failure::usage(format!(
            "--quant {quant}: of --preset {} there is only {mix}",
            args.preset
        )));
    }
    if !args.skew.is_finite() || args.skew < 0.0 {
        return Err(Failure::usage(format!("--skew {}: it must be 0 or more", args.skew)));
    }
    if args.skew != 0.0 && !routed {
        return Err(Failure::usage(format!("--skew {}: --preset {} has no routing", args.skew, args.preset)));
    }
    let tensors = shapes.tensors();
    let writer = header(&*shapes, &tensors).map_err(|error| Failure::other(error.to_string()))?;
    let part = part_name(&args.out);
    let file = File::create(&part).map_err(|error| Failure::file(&part, &error))?;
    let bar = Bar::new("writing", &args.out);
    let (total, mut done) = (writer.file_bytes().unwrap_or(0), 0);
    let mut next = tensors.iter().enumerate();
    let written = writer.write(file, |_, out| {
        let Some((index, tensor)) = next.next() else { return Ok(()) };
        let seed = args.seed.wrapping_add((index as u64) << 32);
        write_tensor(tensor, args.skew, &mut Random::new(seed), out, &mut |bytes| {
            done += bytes;
            bar.update(done, total);
        })
    });
    drop(bar);
    let renamed = match written {
        Ok(()) => std::fs::rename(&part, &args.out).map_err(|error| Failure::file(&args.out, &error)),
        Err(error) => Err(Failure::file(&args.out, &error)),
    };
    if renamed.is_err() {
        // The half-written file is worth nothing; that it may stay behind is not the error to report.
        let _ = std::fs::remove_file(&part);
    }
    renamed
}

/// The shapes asked for, their mix of types, and whether they have experts.
fn preset(args: &Args) -> Result<(Box<dyn Shapes>, &'static str, bool), Failure> {
    if args.layers == Some(0) {
        return Err(Failure::usage("--layers 0: a model has at least one layer"));
    }
    let layers = |all: usize| args.layers.unwrap_or(all);
    Ok(match args.preset.as_str() {
        "qwen3.6-35b-a3b" => {
            let all = qwen::QWEN36_35B_A3B;
            (Box::new(qwen::Qwen { layers: layers(all.layers), ..all }), "q4_k_m", true)
        }
        "gemma-4-26b-a4b" => {
            let all = gemma::GEMMA4_26B_A4B;
            (Box::new(gemma::Gemma { layers: layers(all.layers), ..all }), "q4_k_m", true)
        }
        "gemma-4-26b-a4b-mmproj" => {
            let all = projector::GEMMA4_26B_A4B;
            (Box::new(projector::Projector { layers: layers(all.layers), ..all }), "bf16", false)
        }
        other => {
            return Err(Failure::usage(format!(
                "--preset {other}: the presets are: qwen3.6-35b-a3b, gemma-4-26b-a4b, gemma-4-26b-a4b-mmproj"
            )));
        }
    })
}

/// The file while it is written: beside the target, so that the rename is atomic.
fn part_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn header(shapes: &dyn Shapes, tensors: &[Planned]) -> skep_gguf::Result<Writer> {
    let mut writer = Writer::new();
    shapes.metadata(&mut writer)?;
    for tensor in tensors {
        writer.tensor(&tensor.name, &tensor.shape, TensorType::from_id(tensor.ty.id())?)?;
    }
    Ok(writer)
}

fn write_tensor(
    tensor: &Planned,
    skew: f32,
    random: &mut Random,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let row_bytes = tensor.ty.row_bytes(cols).ok_or(io::ErrorKind::InvalidInput)?;
    let rows_at_once = ((4 << 20) / row_bytes).clamp(1, rows);
    let mut bytes = vec![0; rows_at_once * row_bytes];
    // Experts are stacks of matrices: each has a first row of its own.
    let matrix_rows = tensor.shape.get(1).map_or(rows, |&rows| rows as usize);
    let ranks = match tensor.content {
        Content::Router { .. } => order_of_experts(rows, random),
        _ => Vec::new(),
    };
    for start in (0..rows).step_by(rows_at_once) {
        let count = rows_at_once.min(rows - start);
        let bytes = &mut bytes[..count * row_bytes];
        match tensor.content {
            Content::Constant(value) => fill_f32(bytes, |_| value),
            Content::Decays => fill_f32(bytes, |_| -0.2525 + 0.2475 * random.signed()),
            Content::Random { std, residual } => {
                blocks::fill(tensor.ty, std, random, bytes);
                if residual {
                    let firsts = (start..start + count).filter(|row| row.is_multiple_of(matrix_rows));
                    firsts.for_each(|row| blocks::zero_row(bytes, row_bytes, row - start));
                }
            }
            Content::Embedding { std, feature } => {
                blocks::fill(tensor.ty, std, random, bytes);
                bytes.chunks_exact_mut(row_bytes).for_each(|row| blocks::set_first(tensor.ty, row, feature));
            }
            Content::Turning { first } => {
                fill_f32(bytes, |at| if start * cols + at < first { 1.0 } else { 1e30 })
            }
            Content::Router { std } => {
                blocks::fill(tensor.ty, std, random, bytes);
                for (row, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                    let rank = ranks[start + row] as f32 + 1.0;
                    bytes[..4].copy_from_slice(&(-skew * rank.ln()).to_le_bytes());
                }
            }
        }
        out.write_all(bytes)?;
        progress(bytes.len() as u64);
    }
    Ok(())
}

/// A popularity rank for each expert of a layer, shuffled.
fn order_of_experts(count: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    order
}

fn fill_f32(bytes: &mut [u8], mut value: impl FnMut(usize) -> f32) {
    for (index, chunk) in bytes.chunks_exact_mut(4).enumerate() {
        chunk.copy_from_slice(&value(index).to_le_bytes());
    }
}
