//! `skep synth`: models of true shapes with random weights, to measure speed without a download.

mod blocks;
mod plan;

use crate::failure::Failure;
use crate::model::Bar;
use crate::random::Random;
use plan::{Content, Planned, Preset};
use skep_engine::tokenizer::char_of;
use skep_gguf::{TensorType, Writer};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a seeded model of true shapes with random weights, for speed
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which model's shapes: qwen3.6-35b-a3b
    #[arg(long, value_name = "NAME")]
    preset: String,
    /// Layers to write; all by default
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Mix of types: q4_k_m
    #[arg(long, value_name = "TYPE", default_value = "q4_k_m")]
    quant: String,
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
    let preset = preset(args)?;
    if args.quant != "q4_k_m" {
        return Err(Failure::usage(format!("--quant {}: the mixes are: q4_k_m", args.quant)));
    }
    if !args.skew.is_finite() || args.skew < 0.0 {
        return Err(Failure::usage(format!("--skew {}: it must be 0 or more", args.skew)));
    }
    let tensors = preset.tensors();
    let writer = header(&preset, &tensors).map_err(|error| Failure::other(error.to_string()))?;
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

fn preset(args: &Args) -> Result<Preset, Failure> {
    let preset = match args.preset.as_str() {
        "qwen3.6-35b-a3b" => plan::QWEN36_35B_A3B,
        other => return Err(Failure::usage(format!("--preset {other}: the presets are: qwen3.6-35b-a3b"))),
    };
    match args.layers {
        Some(0) => Err(Failure::usage("--layers 0: a model has at least one layer")),
        Some(layers) => Ok(Preset { layers, ..preset }),
        None => Ok(preset),
    }
}

/// The file while it is written: beside the target, so that the rename is atomic.
fn part_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

fn header(preset: &Preset, tensors: &[Planned]) -> skep_gguf::Result<Writer> {
    let mut writer = Writer::new();
    let key = |name: &str| format!("{}.{name}", preset.architecture);
    writer.set("general.architecture", preset.architecture)?;
    writer.set("general.name", format!("{}-synthetic-{}-layers", preset.name, preset.layers).as_str())?;
    writer.set("general.quantization_version", 2_u32)?;
    // llama.cpp's number for "mostly Q4_K, medium".
    writer.set("general.file_type", 15_u32)?;
    let inner = preset.value_dim();
    for (name, value) in [
        ("block_count", preset.layers),
        ("embedding_length", preset.hidden),
        ("attention.head_count", preset.q_heads),
        ("attention.head_count_kv", preset.kv_heads),
        ("attention.key_length", preset.head_dim),
        ("attention.value_length", preset.head_dim),
        ("rope.dimension_count", preset.rope_dims),
        ("expert_count", preset.experts),
        ("expert_used_count", preset.experts_used),
        ("expert_feed_forward_length", preset.expert_ff),
        ("expert_shared_feed_forward_length", preset.expert_ff),
        ("full_attention_interval", preset.interval),
        ("ssm.conv_kernel", preset.conv_kernel),
        ("ssm.state_size", preset.state_dim),
        ("ssm.group_count", preset.k_heads),
        ("ssm.time_step_rank", preset.v_heads),
        ("ssm.inner_size", inner),
    ] {
        writer.set(&key(name), value as u32)?;
    }
    writer.set(&key("context_length"), preset.context)?;
    writer.set(&key("attention.layer_norm_rms_epsilon"), 1e-6_f32)?;
    writer.set(&key("rope.freq_base"), preset.rope_base)?;
    writer.set(&key("rope.dimension_sections"), preset.rope_sections)?;
    let recurrent: Vec<bool> = (0..preset.layers).map(|layer| preset.is_recurrent(layer)).collect();
    writer.set(&key("attention.recurrent_layers"), recurrent)?;
    vocabulary(preset.vocab, &mut writer)?;
    for tensor in tensors {
        writer.tensor(&tensor.name, &tensor.shape, TensorType::from_id(tensor.ty.id())?)?;
    }
    Ok(writer)
}

/// A vocabulary of the true size: the 256 bytes, two control tokens, and fillers that no text becomes.
fn vocabulary(size: usize, writer: &mut Writer) -> skep_gguf::Result<()> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const UNUSED: i32 = 5;
    let mut tokens: Vec<String> = (0..=255).map(|byte| String::from(char_of(byte))).collect();
    let mut types = vec![NORMAL; tokens.len()];
    for control in ["<|im_start|>", "<|im_end|>"] {
        tokens.push(control.to_owned());
        types.push(CONTROL);
    }
    let end = tokens.len() as u32 - 1;
    for filler in tokens.len()..size {
        tokens.push(format!("<filler-{filler}>"));
        types.push(UNUSED);
    }
    writer.set("tokenizer.ggml.model", "gpt2")?;
    writer.set("tokenizer.ggml.pre", "qwen35")?;
    writer.set("tokenizer.ggml.tokens", tokens)?;
    writer.set("tokenizer.ggml.token_type", types)?;
    writer.set("tokenizer.ggml.merges", Vec::<String>::new())?;
    writer.set("tokenizer.ggml.eos_token_id", end)?;
    writer.set("tokenizer.ggml.add_bos_token", false)?;
    writer.set(
        "tokenizer.chat_template",
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )?;
    Ok(())
}

/// The constant first feature of every token's residual stream.
const FEATURE: f32 = 1.0;

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
            Content::Embedding => {
                blocks::fill(tensor.ty, 0.25, random, bytes);
                bytes.chunks_exact_mut(row_bytes).for_each(|row| blocks::set_first_q4_k(row, FEATURE));
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
