use crate::error::{Error, Result};
use crate::keys::Keys;
use skep_gguf::Gguf;
use skep_vision::{Activation, Config, Tiling};

/// The projector type that this engine knows.
const KIND: &str = "gemma4v";
/// What the keys of a vision tower begin with.
pub(super) const PREFIX: &str = "clip.vision";
/// Constants of the type, which its files do not hold.
const POOLING: usize = 3;
const ROPE_BASE: f32 = 100.0;

/// The sizes of the tower in a file, and what was noticed.
pub(super) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<(Config, Vec<String>)> {
    let architecture = file.architecture()?;
    if architecture != "clip" {
        return Err(Error::model(format_args!(
            "the file is a model of architecture {architecture}, not a projector"
        )));
    }
    if file.bool("clip.has_vision_encoder")? == Some(false) {
        return Err(Error::model("the projector has no vision encoder"));
    }
    let kind = match file.str("clip.vision.projector_type")? {
        Some(kind) => Some(kind),
        None => file.str("clip.projector_type")?,
    };
    match kind {
        Some(KIND) => {}
        Some(other) => {
            return Err(Error::model(format_args!(
                "projector type {other} is not supported (supported: {KIND})"
            )));
        }
        None => return Err(Error::model("missing metadata key clip.vision.projector_type")),
    }
    for (key, neutral) in [("image_mean", 0.0), ("image_std", 1.0)] {
        let key = format!("clip.vision.{key}");
        if let Some(values) = file.array(&key)?
            && !values.f32s()?.all(|value| value == neutral)
        {
            return Err(Error::model(format_args!("{key} is not {neutral}, as {KIND} has it")));
        }
    }
    let keys = Keys { file, prefix: PREFIX };
    let tiling = Tiling::new(keys.nonzero("patch_size")?, POOLING).map_err(Error::model)?;
    let config = Config {
        hidden: keys.nonzero("embedding_length")?,
        heads: keys.nonzero("attention.head_count")?,
        ff: keys.nonzero("feed_forward_length")?,
        tiling,
        eps: keys.f32("attention.layer_norm_epsilon")?,
        rope_base: ROPE_BASE,
        activation: activation(file)?,
    };
    Ok((config, Vec::new()))
}

/// The tanh form of GELU, as the model was trained, unless the file asks for SiLU. Converters write neither key.
fn activation<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Activation> {
    let gelu = file.bool("clip.use_gelu")?.unwrap_or(false);
    let silu = file.bool("clip.use_silu")?.unwrap_or(false);
    match (gelu, silu) {
        (true, true) => Err(Error::model("both clip.use_gelu and clip.use_silu are true")),
        (false, true) => Ok(Activation::Silu),
        _ => Ok(Activation::GeluTanh),
    }
}
