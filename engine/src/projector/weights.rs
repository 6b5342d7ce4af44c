use super::config::PREFIX;
use crate::error::{Error, Result};
use crate::keys::Keys;
use crate::store::{Claims, Store, Weight};
use skep_gguf::Gguf;
use skep_quant::{Matrix, Type};
use skep_vision::{Block, Clip, Config, Linear, Standardise};

/// Every tensor of the tower by its role.
pub(super) struct Weights {
    patches: Layer,
    /// `[2, positions, hidden]`
    pub(super) positions: Vec<f32>,
    blocks: Vec<BlockWeights>,
    standardise: Option<[Vec<f32>; 2]>,
    projection: Projection,
}

/// A linear layer and the bounds of what goes in and comes out.
struct Layer {
    weight: Weight,
    input: Clip,
    output: Clip,
}

struct BlockWeights {
    attn_norm: Vec<f32>,
    q: Layer,
    k: Layer,
    v: Layer,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    out: Layer,
    attn_post_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    gate: Layer,
    up: Layer,
    down: Layer,
    ffn_post_norm: Vec<f32>,
}

/// The projection `[hidden, width]`.
enum Projection {
    /// In the order of GGUF: rows are outputs.
    Straight(Layer),
    /// Stored with rows as inputs, turned round on loading: f32.
    Turned { bytes: Vec<u8>, rows: usize, input: Clip, output: Clip },
}

const PROJECTION: &str = "mm.input_projection";
const POSITIONS: &str = "v.position_embd.weight";

impl Weights {
    /// Gives every tensor its role; `hidden` is the length of the model's embedding.
    pub(super) fn claim<B: AsRef<[u8]>>(
        file: &Gguf<B>,
        config: &Config,
        hidden: usize,
        claims: &mut Claims<'_, B>,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let width = config.hidden;
        // First, so that the projector of another model is called that, whatever else is wrong.
        let projection = Projection::claim(file, width, hidden, claims)?;
        let patch = config.tiling.patch();
        let name = "v.patch_embd";
        let weight = claims.convolution(&format!("{name}.weight"), width, 3 * patch * patch)?;
        let patches = Layer::bounded(name, weight, claims)?;
        let positions = match file.tensor(POSITIONS) {
            Some(info) => match *info.shape() {
                [len, n, 2] if len == width as u64 => claims.vector(POSITIONS, 2 * n as usize * width)?,
                _ => {
                    return Err(Error::model(format_args!(
                        "tensor {POSITIONS} has shape {:?}, but the metadata ask for two tables of rows of {width}",
                        info.shape()
                    )));
                }
            },
            None => claims.vector(POSITIONS, 0)?,
        };
        let standardise = match claims.has("v.std_bias") || claims.has("v.std_scale") {
            true => Some([claims.vector("v.std_bias", width)?, claims.vector("v.std_scale", width)?]),
            false => None,
        };
        let count = Keys { file, prefix: PREFIX }.nonzero("block_count")?;
        let blocks =
            (0..count).map(|block| BlockWeights::claim(config, claims, block)).collect::<Result<_>>()?;
        set_audio_aside(file, claims, warnings)?;
        Ok(Self { patches, positions, blocks, standardise, projection })
    }

    /// The weights where they lie.
    pub(super) fn borrow<'a>(&'a self, store: &'a Store) -> skep_vision::Weights<'a> {
        let blocks = self.blocks.iter().map(|block| block.borrow(store)).collect();
        let standardise = self.standardise.as_ref().map(|[bias, scale]| Standardise { bias, scale });
        let patches = self.patches.borrow(store);
        let projection = match &self.projection {
            Projection::Straight(layer) => layer.borrow(store),
            Projection::Turned { bytes, rows, input, output } => {
                let cols = bytes.len() / 4 / rows;
                let weight =
                    Matrix::new(Type::F32, *rows, cols, bytes).expect("made with this number of rows");
                Linear { weight, input: *input, output: *output }
            }
        };
        skep_vision::Weights { patches, positions: &self.positions, blocks, standardise, projection }
    }
}

impl Layer {
    /// Claims `name.weight` and the bounds beside it.
    fn claim<B: AsRef<[u8]>>(
        name: &str,
        rows: usize,
        cols: usize,
        claims: &mut Claims<'_, B>,
    ) -> Result<Self> {
        let weight = claims.matrix(&format!("{name}.weight"), rows, cols)?;
        Self::bounded(name, weight, claims)
    }

    fn bounded<B: AsRef<[u8]>>(name: &str, weight: Weight, claims: &mut Claims<'_, B>) -> Result<Self> {
        let [input, output] = bounds(name, claims)?;
        Ok(Self { weight, input, output })
    }

    fn borrow<'a>(&self, store: &'a Store) -> Linear<'a> {
        Linear { weight: store.matrix(&self.weight), input: self.input, output: self.output }
    }
}

/// The bounds of a layer's input and output; a bound without a tensor does not bind.
fn bounds<B: AsRef<[u8]>>(name: &str, claims: &mut Claims<'_, B>) -> Result<[Clip; 2]> {
    let mut clip = |side: &str| -> Result<Clip> {
        let mut bound = |which: &str, otherwise: f32| -> Result<f32> {
            let tensor = format!("{name}.{side}_{which}");
            if !claims.has(&tensor) {
                return Ok(otherwise);
            }
            let value = claims.vector(&tensor, 1)?[0];
            match value.is_nan() {
                true => Err(Error::model(format_args!("tensor {tensor} is not a number"))),
                false => Ok(value),
            }
        };
        let Clip { min, max } = Clip::NONE;
        let clip = Clip { min: bound("min", min)?, max: bound("max", max)? };
        if clip.min > clip.max {
            return Err(Error::model(format_args!(
                "tensor {name}.{side}_min is {} and {name}.{side}_max {}: nothing lies between",
                clip.min, clip.max
            )));
        }
        Ok(clip)
    };
    Ok([clip("input")?, clip("output")?])
}

impl BlockWeights {
    fn claim<B: AsRef<[u8]>>(config: &Config, claims: &mut Claims<'_, B>, block: usize) -> Result<Self> {
        let (width, ff, dim) = (config.hidden, config.ff, config.head_dim());
        let name = |role: &str| format!("v.blk.{block}.{role}");
        let mut layer = |role: &str, rows, cols| Layer::claim(&name(role), rows, cols, claims);
        let (q, k) = (layer("attn_q", width, width)?, layer("attn_k", width, width)?);
        let (v, out) = (layer("attn_v", width, width)?, layer("attn_out", width, width)?);
        let (gate, up) = (layer("ffn_gate", ff, width)?, layer("ffn_up", ff, width)?);
        let down = layer("ffn_down", width, ff)?;
        let mut norm = |role: &str, len| claims.vector(&format!("{}.weight", name(role)), len);
        Ok(Self {
            attn_norm: norm("ln1", width)?,
            q_norm: norm("attn_q_norm", dim)?,
            k_norm: norm("attn_k_norm", dim)?,
            attn_post_norm: norm("attn_post_norm", width)?,
            ffn_norm: norm("ln2", width)?,
            ffn_post_norm: norm("ffn_post_norm", width)?,
            q,
            k,
            v,
            out,
            gate,
            up,
            down,
        })
    }

    fn borrow<'a>(&'a self, store: &'a Store) -> Block<'a> {
        Block {
            attn_norm: &self.attn_norm,
            q: self.q.borrow(store),
            k: self.k.borrow(store),
            v: self.v.borrow(store),
            q_norm: &self.q_norm,
            k_norm: &self.k_norm,
            out: self.out.borrow(store),
            attn_post_norm: &self.attn_post_norm,
            ffn_norm: &self.ffn_norm,
            gate: self.gate.borrow(store),
            up: self.up.borrow(store),
            down: self.down.borrow(store),
            ffn_post_norm: &self.ffn_post_norm,
        }
    }
}

impl Projection {
    /// Claims the projection from `width` to `hidden`, whichever way round the file holds it. A square one is in the
    /// order of GGUF.
    fn claim<B: AsRef<[u8]>>(
        file: &Gguf<B>,
        width: usize,
        hidden: usize,
        claims: &mut Claims<'_, B>,
    ) -> Result<Self> {
        let wrong = |n: u64| {
            Err(Error::model(format_args!(
                "it projects to {n}, the model's embedding is {hidden}: the wrong mmproj for this model"
            )))
        };
        let name = format!("{PROJECTION}.weight");
        let shape = file.tensor(&name).map_or(&[][..], |info| info.shape());
        let (width_dim, hidden_dim) = (width as u64, hidden as u64);
        let turned = match *shape {
            [cols, rows] if cols == width_dim && rows == hidden_dim => false,
            [cols, rows] if cols == hidden_dim && rows == width_dim => true,
            [cols, n] | [n, cols] if cols == width_dim => return wrong(n),
            [] => false,
            _ => {
                return Err(Error::model(format_args!(
                    "tensor {name} has shape {shape:?}, but the metadata ask for one side of {width}"
                )));
            }
        };
        if let Some(n) = file.u64("clip.vision.projection_dim")?.filter(|&n| n != hidden_dim) {
            return wrong(n);
        }
        if !turned {
            return Ok(Self::Straight(Layer::claim(PROJECTION, hidden, width, claims)?));
        }
        let stored = claims.vector(&name, width * hidden)?;
        let mut bytes = Vec::with_capacity(4 * stored.len());
        for output in 0..hidden {
            for input in stored.chunks_exact(hidden) {
                bytes.extend(input[output].to_le_bytes());
            }
        }
        let [input, output] = bounds(PROJECTION, claims)?;
        Ok(Self::Turned { bytes, rows: hidden, input, output })
    }
}

/// Recognises the tensors of an audio encoder beside the tower: pictures need none of them.
fn set_audio_aside<B: AsRef<[u8]>>(
    file: &Gguf<B>,
    claims: &mut Claims<'_, B>,
    warnings: &mut Vec<String>,
) -> Result<()> {
    let mut count = 0;
    let audio = |name: &str| name.starts_with("a.") || name.starts_with("mm.a.");
    for name in file.tensors().iter().map(|info| info.name()).filter(|name| audio(name)) {
        claims.set_aside(name)?;
        count += 1;
    }
    if count > 0 {
        warnings.push(format!(
            "the projector's audio encoder ({count} tensors) is set aside: audio is not supported"
        ));
    }
    Ok(())
}
