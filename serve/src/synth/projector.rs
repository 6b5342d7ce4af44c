//! The vision tower of Gemma 4 and its projection.

use super::plan::{Content, List, MOSTLY_BF16, Planned, Shapes, general};
use skep_gguf::Writer;
use skep_quant::Type;

/// The sizes of a tower.
#[derive(Debug, Clone)]
pub(crate) struct Projector {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) ff: usize,
    pub(crate) patch: usize,
    /// Columns, and rows, that have a position.
    pub(crate) positions: usize,
    /// Embedding length of the language model.
    pub(crate) out: usize,
}

/// The tower of Gemma 4 26B-A4B, sizes as its published configuration gives them.
pub(crate) const GEMMA4_26B_A4B: Projector =
    Projector { layers: 27, hidden: 1152, heads: 16, ff: 4304, patch: 16, positions: 10_240, out: 2816 };

impl Projector {
    fn block(&self, block: usize, list: &mut List) {
        let name = |role: &str| format!("v.blk.{block}.{role}.weight");
        let Self { hidden: h, heads, ff, .. } = *self;
        let head_dim = h / heads;
        // Scores are not scaled: with these norms a query and a key have a product of deviation 1.5.
        let head_norm = (1.5 / (head_dim as f32).sqrt()).sqrt();
        for norm in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"] {
            list.constant(name(norm), h, 1.0);
        }
        for layer in ["attn_q", "attn_k", "attn_v", "attn_out"] {
            list.random(name(layer), &[h, h], Type::BF16, false);
        }
        list.constant(name("attn_q_norm"), head_dim, head_norm);
        list.constant(name("attn_k_norm"), head_dim, head_norm);
        list.random(name("ffn_gate"), &[h, ff], Type::BF16, false);
        list.random(name("ffn_up"), &[h, ff], Type::BF16, false);
        list.random(name("ffn_down"), &[ff, h], Type::BF16, false);
    }
}

impl Shapes for Projector {
    fn metadata(&self, writer: &mut Writer) -> skep_gguf::Result<()> {
        general(writer, "clip", "gemma-4-26b-a4b-mmproj", self.layers, MOSTLY_BF16)?;
        writer.set("general.type", "mmproj")?;
        writer.set("clip.has_vision_encoder", true)?;
        writer.set("clip.vision.projector_type", "gemma4v")?;
        for (name, value) in [
            ("projection_dim", self.out),
            // Pictures have no fixed size; files of the published model say this.
            ("image_size", 224),
            ("patch_size", self.patch),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ff),
            ("block_count", self.layers),
            ("attention.head_count", self.heads),
        ] {
            writer.set(&format!("clip.vision.{name}"), value as u32)?;
        }
        writer.set("clip.vision.attention.layer_norm_epsilon", 1e-6_f32)?;
        writer.set("clip.vision.image_mean", vec![0.0_f32; 3])?;
        writer.set("clip.vision.image_std", vec![1.0_f32; 3])?;
        Ok(())
    }

    fn tensors(&self) -> Vec<Planned> {
        let mut list = List::default();
        let Self { hidden: h, patch, .. } = *self;
        list.random("mm.input_projection.weight", &[h, self.out], Type::BF16, false);
        let embedding = Content::Random { std: ((3 * patch * patch) as f32).sqrt().recip(), residual: false };
        list.push("v.patch_embd.weight", &[patch, patch, 3, h], Type::F32, embedding);
        let position = Content::Random { std: 0.5, residual: false };
        list.push("v.position_embd.weight", &[h, self.positions, 2], Type::F32, position);
        list.constant("v.std_bias", h, 0.0);
        list.constant("v.std_scale", h, 1.0);
        for block in 0..self.layers {
            self.block(block, &mut list);
        }
        list.tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tower_has_the_parameters_of_its_shape() {
        let tensors = GEMMA4_26B_A4B.tensors();
        assert_eq!(tensors.len(), 5 + 27 * 13);
        let blocks: usize =
            tensors.iter().filter(|t| t.name.starts_with("v.blk.")).map(Planned::values).sum();
        // Four square matrices and three of the feed-forward in each block, beside norms.
        assert_eq!(blocks, 27 * (4 * 1152 * 1152 + 3 * 1152 * 4304 + 4 * 1152 + 2 * 72));
        let bytes: usize = tensors.iter().map(Planned::bytes).sum();
        assert!((1_190_000_000..1_200_000_000).contains(&bytes), "{bytes} bytes");
    }
}
