use crate::error::{Error, Result};
use crate::keys::{Keys, block_tensor};
use skep_gdn::HeadOrder;
use skep_gguf::Gguf;

/// The sizes of a `qwen35moe` model, from the metadata; nothing is assumed.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Layers of the trunk, draft blocks left out.
    pub(crate) layers: usize,
    /// Index of the draft (multi-token prediction) block, if the file has one.
    pub(crate) draft: Option<usize>,
    pub(crate) hidden: usize,
    pub(crate) context: usize,
    pub(crate) eps: f32,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rope_base: f32,
    pub(crate) rope_dims: usize,
    pub(crate) rope_sections: [usize; 4],
    pub(crate) experts: usize,
    pub(crate) experts_used: usize,
    pub(crate) expert_ff: usize,
    pub(crate) shared_ff: usize,
    pub(crate) gdn: skep_gdn::Shape,
    /// Per trunk layer: true for Gated DeltaNet. Decided by the tensor table.
    pub(crate) recurrent: Vec<bool>,
    pub(crate) vocab: usize,
    pub(crate) warnings: Vec<String>,
}

impl Config {
    pub(crate) fn read<B: AsRef<[u8]>>(file: &Gguf<B>) -> Result<Self> {
        let keys = Keys::new(file)?;
        let mut warnings = Vec::new();
        let (layers, draft) = trunk(&keys, &mut warnings)?;
        let recurrent = layer_kinds(&keys, layers, &mut warnings)?;

        let head_dim = keys.usize("attention.key_length")?;
        let value_dim = keys.usize("attention.value_length")?;
        if head_dim != value_dim {
            return Err(Error::model(format_args!(
                "{0}.attention.key_length is {head_dim} and {0}.attention.value_length {value_dim}: they must be equal",
                keys.prefix
            )));
        }
        let rope_dims = keys.usize("rope.dimension_count")?;
        let rope_sections = sections(&keys, rope_dims)?;

        let inner = keys.usize("ssm.inner_size")?;
        let v_heads = keys.usize("ssm.time_step_rank")?;
        if v_heads == 0 || inner % v_heads != 0 {
            return Err(Error::model(format_args!(
                "{0}.ssm.inner_size {inner} is not a multiple of {0}.ssm.time_step_rank {v_heads}",
                keys.prefix
            )));
        }
        let order = match file.bool(&keys.name("ssm.v_head_reordered"))? {
            Some(false) => HeadOrder::Grouped,
            Some(true) | None => HeadOrder::Tiled,
        };
        let gdn = skep_gdn::Shape::new(
            keys.usize("ssm.group_count")?,
            v_heads,
            keys.usize("ssm.state_size")?,
            inner / v_heads,
            keys.usize("ssm.conv_kernel")?,
            order,
        )
        .map_err(|error| Error::model(format_args!("{}.ssm: {error}", keys.prefix)))?;

        let (experts, experts_used) = keys.experts()?;
        let vocab = keys.vocab()?;

        Ok(Self {
            layers,
            draft,
            hidden: keys.nonzero("embedding_length")?,
            context: keys.nonzero("context_length")?,
            eps: keys.f32("attention.layer_norm_rms_epsilon")?,
            q_heads: keys.single("attention.head_count")?,
            kv_heads: keys.single("attention.head_count_kv")?,
            head_dim,
            rope_base: keys.f32("rope.freq_base")?,
            rope_dims,
            rope_sections,
            experts,
            experts_used,
            expert_ff: keys.single("expert_feed_forward_length")?,
            shared_ff: keys.single("expert_shared_feed_forward_length")?,
            gdn,
            recurrent,
            vocab,
            warnings,
        })
    }
}

/// Layers of the trunk and the index of the draft block.
///
/// Files of fine-tuned models may announce draft blocks that were stripped; those load without one, with a warning.
fn trunk<B: AsRef<[u8]>>(keys: &Keys<'_, B>, warnings: &mut Vec<String>) -> Result<(usize, Option<usize>)> {
    let blocks = keys.nonzero("block_count")?;
    let announced = keys.file.usize(&keys.name("nextn_predict_layers"))?.unwrap_or(0);
    if announced >= blocks {
        return Err(Error::model(format_args!(
            "{}.nextn_predict_layers is {announced}, but there are only {blocks} blocks",
            keys.prefix
        )));
    }
    let mut present = vec![false; blocks];
    let mut draft_tensors = vec![false; blocks];
    for tensor in keys.file.tensors() {
        let Some((index, role)) = block_tensor(tensor.name()) else { continue };
        if index >= blocks {
            return Err(Error::model(format_args!(
                "tensor {} lies outside the {blocks} blocks of {}",
                tensor.name(),
                keys.name("block_count")
            )));
        }
        present[index] = true;
        draft_tensors[index] |= role.starts_with("nextn.");
    }
    if keys.file.tensors().iter().any(|tensor| tensor.name().starts_with("mtp.")) {
        return Err(Error::model(
            "tensors named mtp.* at the top level are an unsupported form of the draft block",
        ));
    }
    let has_draft = draft_tensors.iter().any(|&draft| draft);
    if has_draft && !present[0] {
        return Err(Error::model(
            "this file holds only a draft block (blk.0 is missing): it is a companion, not a model",
        ));
    }
    if !has_draft {
        let layers = present.iter().rposition(|&here| here).map_or(0, |last| last + 1);
        if announced > 0 {
            if layers + announced < blocks {
                return Err(Error::model(format_args!(
                    "the file has {layers} of {blocks} blocks: blk.{layers} and what follows are missing"
                )));
            }
            warnings.push(format!(
                "{} announces {announced} draft block(s), but the file has none",
                keys.name("nextn_predict_layers")
            ));
            return Ok((layers, None));
        }
        return Ok((blocks, None));
    }
    if announced > 1 {
        return Err(Error::model(format_args!(
            "{} is {announced}: more than one draft block is not supported",
            keys.name("nextn_predict_layers")
        )));
    }
    let layers = blocks - 1;
    match draft_tensors.iter().position(|&draft| draft) {
        Some(index) if index == layers && announced == 1 => Ok((layers, Some(layers))),
        index => Err(Error::model(format_args!(
            "blk.{} holds draft tensors (nextn.*), but {} is {announced} with {blocks} blocks",
            index.unwrap_or(0),
            keys.name("nextn_predict_layers")
        ))),
    }
}

/// Which trunk layers are recurrent: those with `ssm_*` tensors.
fn layer_kinds<B: AsRef<[u8]>>(
    keys: &Keys<'_, B>,
    layers: usize,
    warnings: &mut Vec<String>,
) -> Result<Vec<bool>> {
    let mut recurrent = vec![false; layers];
    for tensor in keys.file.tensors() {
        if let Some((index, role)) = block_tensor(tensor.name())
            && let Some(kind) = recurrent.get_mut(index)
        {
            *kind |= role.starts_with("ssm_");
        }
    }
    let list_name = keys.name("attention.recurrent_layers");
    if let Some(list) = keys.file.per_layer_bool(&list_name)? {
        for (layer, &kind) in recurrent.iter().enumerate() {
            if list.at(layer) != Some(kind) {
                return Err(Error::model(format_args!(
                    "layer {layer} is {} by its tensors, but {list_name} says otherwise",
                    if kind { "recurrent" } else { "full attention" }
                )));
            }
        }
        return Ok(recurrent);
    }
    let interval = keys.file.usize(&keys.name("full_attention_interval"))?.unwrap_or(4);
    let irregular: Vec<usize> = recurrent
        .iter()
        .enumerate()
        .filter(|&(layer, &kind)| interval > 0 && kind == ((layer + 1) % interval == 0))
        .map(|(layer, _)| layer)
        .collect();
    if !irregular.is_empty() {
        warnings.push(format!(
            "layers {irregular:?} are not of the kind that a full-attention interval of {interval} gives; the tensors decide"
        ));
    }
    Ok(recurrent)
}

fn sections<B: AsRef<[u8]>>(keys: &Keys<'_, B>, rope_dims: usize) -> Result<[usize; 4]> {
    let name = keys.name("rope.dimension_sections");
    let Some(list) = keys.file.per_layer_usize(&name)? else {
        return Ok([rope_dims / 2, 0, 0, 0]);
    };
    let mut sections = [0; 4];
    for (axis, section) in sections.iter_mut().enumerate() {
        *section = list.at(axis).unwrap_or(0);
    }
    if sections.iter().sum::<usize>() != rope_dims / 2 || sections[3] != 0 {
        return Err(Error::model(format_args!(
            "{name} is {sections:?}: it must sum to {} with a fourth entry of 0",
            rope_dims / 2
        )));
    }
    Ok(sections)
}
