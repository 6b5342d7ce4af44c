use crate::error::{Error, Result};
use crate::keys::{Keys, block_tensor};
use skep_gguf::Gguf;

/// The sizes of a `gemma4` model, from the metadata; nothing is assumed.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    pub(crate) context: usize,
    pub(crate) eps: f32,
    /// Tokens that a sliding layer sees, the query's own among them.
    pub(crate) window: usize,
    pub(crate) layers: Vec<LayerShape>,
    /// Rotation of the layers that see everything; the file adds a divisor for each frequency.
    pub(crate) full_rope: RopeShape,
    pub(crate) sliding_rope: RopeShape,
    pub(crate) moe: Option<Moe>,
    /// Logits are `cap · tanh(logit / cap)`.
    pub(crate) softcap: Option<f32>,
    /// Size of the embedding that every layer has of its own, if there are any.
    pub(crate) per_layer: Option<usize>,
}

/// One layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerShape {
    pub(crate) sliding: bool,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Width of the dense feed-forward.
    pub(crate) ff: usize,
    /// Index of its KV cache among those of its kind.
    pub(crate) cache: usize,
    /// Whether it fills that cache; otherwise it reads what an earlier layer of its kind has put there.
    pub(crate) owns_cache: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RopeShape {
    pub(crate) head_dim: usize,
    pub(crate) dims: usize,
    pub(crate) base: f32,
}

/// The routed experts of every layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moe {
    pub(crate) experts: usize,
    pub(crate) used: usize,
    pub(crate) ff: usize,
}

impl Config {
    pub(crate) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Self> {
        let keys = Keys::new(file)?;
        let blocks = keys.nonzero("block_count")?;
        if let Some(tensor) = file
            .tensors()
            .iter()
            .find(|tensor| block_tensor(tensor.name()).is_some_and(|(index, _)| index >= blocks))
        {
            return Err(Error::model(format_args!(
                "tensor {} lies outside the {blocks} blocks of {}",
                tensor.name(),
                keys.name("block_count")
            )));
        }
        let full_rope = rope(&keys, "")?;
        let sliding = sliding(&keys, blocks)?;
        let any_sliding = sliding.contains(&true);
        let sliding_rope = if any_sliding { rope(&keys, "_swa")? } else { full_rope };
        let moe = match file.usize(&keys.name("expert_count"))? {
            None | Some(0) => None,
            Some(_) => {
                let (experts, used) = keys.experts()?;
                Some(Moe { experts, used, ff: keys.single("expert_feed_forward_length")? })
            }
        };
        Ok(Self {
            hidden: keys.nonzero("embedding_length")?,
            vocab: keys.vocab()?,
            context: keys.nonzero("context_length")?,
            eps: keys.f32("attention.layer_norm_rms_epsilon")?,
            window: if any_sliding { keys.nonzero("attention.sliding_window")? } else { 0 },
            layers: layers(&keys, &sliding, full_rope.head_dim, sliding_rope.head_dim)?,
            full_rope,
            sliding_rope,
            moe,
            softcap: match file.f32(&keys.name("final_logit_softcapping"))? {
                None | Some(0.0) => None,
                Some(_) => Some(keys.f32("final_logit_softcapping")?),
            },
            per_layer: file
                .usize(&keys.name("embedding_length_per_layer_input"))?
                .filter(|&length| length > 0),
        })
    }

    /// Whether the tokens of an image see each other on sliding layers.
    ///
    /// The file has no key for it. Models with per-layer embeddings (E2B, E4B) were made without, the others with it.
    pub(crate) fn images_see_themselves(&self) -> bool {
        self.per_layer.is_none()
    }
}

/// Which layers see only a window.
fn sliding<B: AsRef<[u8]>>(keys: &Keys<'_, B>, blocks: usize) -> Result<Vec<bool>> {
    let name = keys.name("attention.sliding_window_pattern");
    let pattern =
        keys.file.per_layer_bool(&name)?.ok_or_else(|| keys.missing("attention.sliding_window_pattern"))?;
    (0..blocks)
        .map(|layer| {
            pattern
                .at(layer)
                .ok_or_else(|| Error::model(format_args!("{name} has no entry for layer {layer}")))
        })
        .collect()
}

/// Head size and rotation of the layers of one kind.
fn rope<B: AsRef<[u8]>>(keys: &Keys<'_, B>, kind: &str) -> Result<RopeShape> {
    let (key, value) = (format!("attention.key_length{kind}"), format!("attention.value_length{kind}"));
    let head_dim = keys.nonzero(&key)?;
    let value_dim = keys.usize(&value)?;
    if head_dim != value_dim {
        return Err(Error::model(format_args!(
            "{} is {head_dim} and {} {value_dim}: they must be equal",
            keys.name(&key),
            keys.name(&value)
        )));
    }
    let dims = keys.file.usize(&keys.name(&format!("rope.dimension_count{kind}")))?;
    let base = keys.f32(&format!("rope.freq_base{kind}"))?;
    Ok(RopeShape { head_dim, dims: dims.unwrap_or(head_dim), base })
}

fn layers<B: AsRef<[u8]>>(
    keys: &Keys<'_, B>,
    sliding: &[bool],
    full_dim: usize,
    sliding_dim: usize,
) -> Result<Vec<LayerShape>> {
    let n = sliding.len();
    let q_heads = keys.per_layer("attention.head_count", n)?;
    let kv_heads = keys.per_layer("attention.head_count_kv", n)?;
    let ff = keys.per_layer("feed_forward_length", n)?;
    let shared_key = keys.name("attention.shared_kv_layers");
    let shared = keys.file.usize(&shared_key)?.unwrap_or(0);
    let owners = n
        .checked_sub(shared)
        .ok_or_else(|| Error::model(format_args!("{shared_key} is {shared}, but there are {n} layers")))?;
    let mut caches = [0_usize; 2];
    let mut layers = Vec::with_capacity(n);
    for (layer, &sliding) in sliding.iter().enumerate() {
        let owns_cache = layer < owners;
        let count = &mut caches[usize::from(sliding)];
        *count += usize::from(owns_cache);
        // A layer that shares reads the last cache of its kind.
        let cache = count.checked_sub(1).ok_or_else(|| {
            Error::model(format_args!(
                "layer {layer} shares keys and values by {shared_key}, but no earlier layer of its kind has any"
            ))
        })?;
        let (q_heads, kv_heads, ff) = (q_heads[layer], kv_heads[layer], ff[layer]);
        if q_heads == 0 || kv_heads == 0 || q_heads % kv_heads != 0 {
            return Err(Error::model(format_args!(
                "layer {layer} has {q_heads} query heads by {} and {kv_heads} key heads by {}",
                keys.name("attention.head_count"),
                keys.name("attention.head_count_kv")
            )));
        }
        if ff == 0 {
            let name = keys.name("feed_forward_length");
            return Err(Error::model(format_args!("{name} is 0 for layer {layer}")));
        }
        let head_dim = if sliding { sliding_dim } else { full_dim };
        layers.push(LayerShape { sliding, q_heads, kv_heads, head_dim, ff, cache, owns_cache });
    }
    for (layer, reader) in layers.iter().enumerate().filter(|(_, layer)| !layer.owns_cache) {
        let owner = layers[..owners]
            .iter()
            .rfind(|owner| owner.sliding == reader.sliding)
            .filter(|owner| owner.kv_heads == reader.kv_heads);
        if owner.is_none() {
            return Err(Error::model(format_args!(
                "layer {layer} has {} key heads, but not the layer whose keys and values it shares",
                reader.kv_heads
            )));
        }
    }
    Ok(layers)
}
