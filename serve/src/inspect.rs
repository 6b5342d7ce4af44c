//! `skep inspect`: what is in a file, and what Skep makes of it.

use crate::failure::Failure;
use serde::Serialize;
use skep_engine::{Inspection, LayerKind};
use skep_gguf::{Gguf, Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

/// Shows a file's header and tensors, and what Skep makes of them
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// GGUF file, or any part of a split one
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print JSON, with every key and tensor
    #[arg(long)]
    json: bool,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    version: u32,
    parts: usize,
    alignment: u32,
    file_bytes: u64,
    architecture: Option<String>,
    name: Option<String>,
    context_length: Option<u64>,
    vocabulary: Option<usize>,
    tokenizer: Option<String>,
    chat_template: bool,
    model: Option<Model>,
    projector: Option<Projector>,
    /// Why Skep would not run the file.
    problem: Option<String>,
    warnings: Vec<String>,
    types: Vec<Role>,
    metadata: BTreeMap<String, serde_json::Value>,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Serialize)]
struct Model {
    layers: usize,
    recurrent_layers: Vec<usize>,
    sliding_attention_layers: Vec<usize>,
    full_attention_layers: Vec<usize>,
    draft_block: Option<usize>,
    draft_bytes: u64,
    experts: usize,
    experts_used: usize,
    active_bytes_per_token: u64,
}

/// The vision tower of a projector file, as its keys have it.
#[derive(Debug, Serialize)]
struct Projector {
    #[serde(rename = "type")]
    kind: String,
    blocks: Option<u64>,
    width: Option<u64>,
    heads: Option<u64>,
    patch: Option<u64>,
    /// Length of the embeddings, which is that of the model it goes with.
    projection: Option<u64>,
}

/// The tensors that share a name but for their block.
#[derive(Debug, Serialize)]
struct Role {
    role: String,
    tensors: usize,
    bytes: u64,
    /// Count by type.
    types: BTreeMap<String, usize>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    #[serde(rename = "type")]
    ty: String,
    offset: u64,
    bytes: u64,
    part: usize,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let file = skep_gguf::open(&args.file).map_err(|error| Failure::other(error.to_string()))?;
    let report = Report::new(&file)?;
    let text = match args.json {
        true => serde_json::to_string_pretty(&report).map_err(|error| Failure::other(error.to_string()))?,
        false => report.text(args.tensors),
    };
    // A closed stdout, as of `skep inspect FILE | head`, is no failure.
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
    Ok(())
}

impl Report {
    fn new(file: &Gguf<Map>) -> Result<Self, Failure> {
        let projector = Projector::new(file);
        let architecture = file.architecture().ok().map(str::to_owned);
        let context = architecture.as_ref().map(|prefix| format!("{prefix}.context_length"));
        let lossy = |key: &str| Some(file.bytes(key).ok()??.to_str_lossy().into_owned());
        let (model, problem, warnings) = match (&projector, skep_engine::inspect(file)) {
            (Some(projector), _) => (None, projector.problem(), Vec::new()),
            (None, Ok(inspection)) => (Some(Model::new(&inspection)), None, inspection.warnings),
            (None, Err(error)) => (None, Some(error.to_string()), Vec::new()),
        };
        Ok(Self {
            version: file.version(),
            parts: file.parts(),
            alignment: file.alignment(),
            file_bytes: file.file_bytes(),
            name: lossy("general.name"),
            context_length: context.and_then(|key| file.u64(&key).ok()?),
            vocabulary: file.array("tokenizer.ggml.tokens").ok().flatten().map(|tokens| tokens.len()),
            tokenizer: lossy("tokenizer.ggml.model").map(|model| match lossy("tokenizer.ggml.pre") {
                Some(pre) => format!("{model}/{pre}"),
                None => model,
            }),
            chat_template: file.get("tokenizer.chat_template").is_some(),
            architecture,
            model,
            projector,
            problem,
            warnings,
            types: roles(file),
            metadata: file.metadata().map(|(key, value)| (key.to_owned(), json(&value))).collect(),
            tensors: file.tensors().iter().map(Tensor::new).collect(),
        })
    }

    fn text(&self, tensors: bool) -> String {
        let mut out = String::new();
        let mut line = |label: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{label:<14} {value}");
        };
        let or_none = |value: &Option<String>| value.clone().unwrap_or_else(|| "(none)".into());
        line("file", format!("GGUF v{}, {} part(s), {}", self.version, self.parts, bytes(self.file_bytes)));
        line("architecture", or_none(&self.architecture));
        line("name", or_none(&self.name));
        if let Some(context) = self.context_length {
            line("context", format!("{context} tokens"));
        }
        if let Some(vocabulary) = self.vocabulary {
            line("vocabulary", format!("{vocabulary} tokens, {}", or_none(&self.tokenizer)));
        }
        line("chat template", if self.chat_template { "yes" } else { "no" }.into());
        if let Some(model) = &self.model {
            let kinds = [
                ("Gated DeltaNet", &model.recurrent_layers, false),
                ("sliding attention", &model.sliding_attention_layers, false),
                ("full attention", &model.full_attention_layers, true),
            ];
            let kinds = kinds.iter().filter(|(_, layers, _)| !layers.is_empty());
            let kinds: Vec<_> = kinds
                .map(|(kind, layers, listed)| match listed {
                    true => format!("{} {kind} {layers:?}", layers.len()),
                    false => format!("{} {kind}", layers.len()),
                })
                .collect();
            line("layers", format!("{}: {}", model.layers, kinds.join(", ")));
            line(
                "experts",
                match model.experts {
                    0 => "none".into(),
                    experts => {
                        format!("{experts}, {} per token, and what every token uses", model.experts_used)
                    }
                },
            );
            line("active", format!("{} of weights per token", bytes(model.active_bytes_per_token)));
            line(
                "draft block",
                match model.draft_block {
                    Some(block) => format!(
                        "blk.{block} (multi-token prediction), {}, set aside",
                        bytes(model.draft_bytes)
                    ),
                    None => "none".into(),
                },
            );
        }
        if let Some(projector) = &self.projector {
            line("projector", projector.text());
        }
        for warning in &self.warnings {
            line("warning", warning.clone());
        }
        if let Some(problem) = &self.problem {
            line("not runnable", problem.clone());
        }
        let _ = writeln!(out, "\n{:<34} {:>7} {:>10}  types", "role", "tensors", "size");
        for role in &self.types {
            let types: Vec<String> = role.types.iter().map(|(ty, count)| format!("{ty} x{count}")).collect();
            let _ = writeln!(
                out,
                "{:<34} {:>7} {:>10}  {}",
                role.role,
                role.tensors,
                bytes(role.bytes),
                types.join(", ")
            );
        }
        if tensors {
            let _ = writeln!(out);
            for tensor in &self.tensors {
                let _ = writeln!(out, "{:<40} {:<8} {:?}", tensor.name, tensor.ty, tensor.shape);
            }
        }
        out
    }
}

impl Model {
    fn new(inspection: &Inspection) -> Self {
        let of_kind = |kind| {
            let layers = inspection.layers.iter().enumerate();
            layers.filter(|(_, layer)| **layer == kind).map(|(index, _)| index).collect()
        };
        Self {
            layers: inspection.layers.len(),
            recurrent_layers: of_kind(LayerKind::GatedDeltaNet),
            sliding_attention_layers: of_kind(LayerKind::SlidingAttention),
            full_attention_layers: of_kind(LayerKind::FullAttention),
            draft_block: inspection.draft_block,
            draft_bytes: inspection.draft_bytes,
            experts: inspection.experts,
            experts_used: inspection.experts_used,
            active_bytes_per_token: inspection.active_bytes_per_token,
        }
    }
}

impl Projector {
    /// `None` if the file is no projector.
    fn new(file: &Gguf<Map>) -> Option<Self> {
        if file.architecture().ok()? != "clip" {
            return None;
        }
        let key = |name: &str| file.u64(&format!("clip.vision.{name}")).ok()?;
        let text = |name: &str| Some(file.bytes(name).ok()??.to_str_lossy().into_owned());
        let kind = text("clip.vision.projector_type").or_else(|| text("clip.projector_type"));
        Some(Self {
            kind: kind.unwrap_or_else(|| "(none)".into()),
            blocks: key("block_count"),
            width: key("embedding_length"),
            heads: key("attention.head_count"),
            patch: key("patch_size"),
            projection: key("projection_dim"),
        })
    }

    fn problem(&self) -> Option<String> {
        let kind = &self.kind;
        (kind != "gemma4v").then(|| format!("projector type {kind} is not supported (supported: gemma4v)"))
    }

    fn text(&self) -> String {
        let number = |value: Option<u64>| value.map_or("?".into(), |value| value.to_string());
        format!(
            "{}: {} blocks of width {}, {} heads, patches of {} pixels; goes with a model of embedding length {}",
            self.kind,
            number(self.blocks),
            number(self.width),
            number(self.heads),
            number(self.patch),
            number(self.projection)
        )
    }
}

impl Tensor {
    fn new(info: &skep_gguf::TensorInfo) -> Self {
        Self {
            name: info.name().to_owned(),
            shape: info.shape().to_vec(),
            ty: info.ty().name().to_owned(),
            offset: info.offset(),
            bytes: info.n_bytes(),
            part: info.part(),
        }
    }
}

/// Tensors grouped by name, the block number left out, in the order of their first appearance.
fn roles(file: &Gguf<Map>) -> Vec<Role> {
    let mut roles: Vec<Role> = Vec::new();
    for info in file.tensors() {
        // The blocks of a model are `blk.N`, those of a tower `v.blk.N`.
        let role = match info.name().split_once("blk.").map(|(tower, rest)| (tower, rest.split_once('.'))) {
            Some((tower, Some((_, role)))) => format!("{tower}blk.*.{role}"),
            _ => info.name().to_owned(),
        };
        let index = roles.iter().position(|other| other.role == role).unwrap_or_else(|| {
            roles.push(Role { role, tensors: 0, bytes: 0, types: BTreeMap::new() });
            roles.len() - 1
        });
        let role = &mut roles[index];
        role.tensors += 1;
        role.bytes += info.n_bytes();
        *role.types.entry(info.ty().name().to_owned()).or_default() += 1;
    }
    roles
}

/// A metadata value as JSON; long arrays by their length and first entries.
fn json(value: &Value<'_>) -> serde_json::Value {
    const SHOWN: usize = 16;
    if let Some(integer) = value.integer() {
        return i64::try_from(integer).map_or_else(|_| integer.to_string().into(), Into::into);
    }
    match value {
        Value::Array(array) if array.len() > SHOWN => serde_json::json!({
            "length": array.len(),
            "first": array.iter().take(SHOWN).map(|item| json(&item)).collect::<Vec<_>>(),
        }),
        Value::Array(array) => array.iter().map(|item| json(&item)).collect(),
        Value::Bool(value) => (*value).into(),
        Value::String(text) => text.to_str_lossy().into_owned().into(),
        other => other.float().map_or(serde_json::Value::Null, Into::into),
    }
}

/// A size for people.
fn bytes(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}
