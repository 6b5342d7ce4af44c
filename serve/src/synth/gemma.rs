//! Gemma 4: sliding and global layers, a dense branch beside the experts.

use super::plan::{Content, List, Planned, Q4_K_M, Shapes, general, more_bits};
use skep_gguf::Writer;
use skep_quant::Type;

const ARCHITECTURE: &str = "gemma4";

/// The sizes of a model. Layers are sliding, but for every sixth and the last.
#[derive(Debug, Clone)]
pub(crate) struct Gemma {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    pub(crate) context: u32,
    pub(crate) window: u32,
    pub(crate) heads: usize,
    pub(crate) sliding: Attention,
    pub(crate) global: Attention,
    /// Frequencies that turn in global layers.
    pub(crate) turning: usize,
    pub(crate) ff: usize,
    pub(crate) experts: usize,
    pub(crate) experts_used: usize,
    pub(crate) expert_ff: usize,
    pub(crate) softcap: f32,
}

/// What differs between the two kinds of layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rope_base: f32,
}

/// Gemma 4 26B-A4B, sizes as its published configuration gives them.
pub(crate) const GEMMA4_26B_A4B: Gemma = Gemma {
    layers: 30,
    hidden: 2816,
    vocab: 262_144,
    context: 262_144,
    window: 1024,
    heads: 16,
    sliding: Attention { kv_heads: 8, head_dim: 256, rope_base: 1e4 },
    global: Attention { kv_heads: 2, head_dim: 512, rope_base: 1e6 },
    turning: 64,
    ff: 2112,
    experts: 128,
    experts_used: 8,
    expert_ff: 704,
    softcap: 30.0,
};

/// Weights of the norms after attention and feed-forward: small beside the embedding, whose first feature the routers read.
const POST_NORM: f32 = 0.1;

impl Gemma {
    fn is_global(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(6) || layer + 1 == self.layers
    }

    fn attention(&self, layer: usize) -> Attention {
        if self.is_global(layer) { self.global } else { self.sliding }
    }

    fn layer(&self, layer: usize, list: &mut List) {
        let name = |role: &str| format!("blk.{layer}.{role}");
        // Rows of the down-projections do not fill blocks of 256: Q4_K falls back to Q5_0, Q6_K to Q8_0.
        let (more, down) =
            if more_bits(layer, self.layers) { (Type::Q6_K, Type::Q8_0) } else { (Type::Q4_K, Type::Q5_0) };
        let Self { hidden: h, experts, expert_ff, ff, .. } = *self;
        let Attention { kv_heads, head_dim, .. } = self.attention(layer);
        let (q, kv) = (self.heads * head_dim, kv_heads * head_dim);
        // Scores are not scaled: with these norms a query and a key have a product of deviation 1.5.
        let head_norm = (1.5 / (head_dim as f32).sqrt()).sqrt();
        list.constant(name("attn_norm.weight"), h, 1.0);
        list.random(name("attn_q.weight"), &[h, q], Type::Q4_K, false);
        list.random(name("attn_k.weight"), &[h, kv], Type::Q4_K, false);
        if !self.is_global(layer) {
            list.random(name("attn_v.weight"), &[h, kv], more, false);
        }
        list.random(name("attn_output.weight"), &[q, h], Type::Q4_K, true);
        list.constant(name("attn_q_norm.weight"), head_dim, head_norm);
        list.constant(name("attn_k_norm.weight"), head_dim, head_norm);
        list.constant(name("post_attention_norm.weight"), h, POST_NORM);
        list.constant(name("ffn_norm.weight"), h, 1.0);
        list.random(name("ffn_gate.weight"), &[h, ff], Type::Q4_K, false);
        list.random(name("ffn_up.weight"), &[h, ff], Type::Q4_K, false);
        list.random(name("ffn_down.weight"), &[ff, h], down, true);
        let router = Content::Router { std: (h as f32).sqrt().recip() };
        list.push(name("ffn_gate_inp.weight"), &[h, experts], Type::F32, router);
        // The router divides its input by the root of the width, and this takes that back.
        list.constant(name("ffn_gate_inp.scale"), h, (h as f32).sqrt());
        list.random(name("ffn_gate_up_exps.weight"), &[h, 2 * expert_ff, experts], Type::Q4_K, false);
        list.random(name("ffn_down_exps.weight"), &[expert_ff, h, experts], down, true);
        list.constant(name("ffn_down_exps.scale"), experts, 1.0);
        list.constant(name("pre_ffw_norm_2.weight"), h, 1.0);
        list.constant(name("post_ffw_norm_1.weight"), h, 1.0);
        list.constant(name("post_ffw_norm_2.weight"), h, 1.0);
        list.constant(name("post_ffw_norm.weight"), h, POST_NORM);
        list.constant(name("layer_output_scale.weight"), 1, 1.0);
    }
}

impl Shapes for Gemma {
    fn metadata(&self, writer: &mut Writer) -> skep_gguf::Result<()> {
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        general(writer, ARCHITECTURE, "gemma-4-26b-a4b", self.layers, Q4_K_M)?;
        for (name, value) in [
            ("block_count", self.layers),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.ff),
            ("attention.head_count", self.heads),
            ("attention.key_length", self.global.head_dim),
            ("attention.value_length", self.global.head_dim),
            ("attention.key_length_swa", self.sliding.head_dim),
            ("attention.value_length_swa", self.sliding.head_dim),
            ("attention.shared_kv_layers", 0),
            ("embedding_length_per_layer_input", 0),
            ("rope.dimension_count", self.global.head_dim),
            ("rope.dimension_count_swa", self.sliding.head_dim),
            ("expert_count", self.experts),
            ("expert_used_count", self.experts_used),
            ("expert_feed_forward_length", self.expert_ff),
        ] {
            writer.set(&key(name), value as u32)?;
        }
        writer.set(&key("context_length"), self.context)?;
        writer.set(&key("attention.sliding_window"), self.window)?;
        writer.set(&key("attention.layer_norm_rms_epsilon"), 1e-6_f32)?;
        writer.set(&key("rope.freq_base"), self.global.rope_base)?;
        writer.set(&key("rope.freq_base_swa"), self.sliding.rope_base)?;
        writer.set(&key("final_logit_softcapping"), self.softcap)?;
        let kv_heads: Vec<i32> =
            (0..self.layers).map(|layer| self.attention(layer).kv_heads as i32).collect();
        writer.set(&key("attention.head_count_kv"), kv_heads)?;
        let sliding: Vec<bool> = (0..self.layers).map(|layer| !self.is_global(layer)).collect();
        writer.set(&key("attention.sliding_window_pattern"), sliding)?;
        vocabulary(self.vocab, writer)
    }

    fn tensors(&self) -> Vec<Planned> {
        let mut list = List::default();
        let h = self.hidden;
        // The model multiplies embeddings by the root of the width.
        let one = (h as f32).sqrt().recip();
        list.push(
            "token_embd.weight",
            &[h, self.vocab],
            Type::Q6_K,
            Content::Embedding { std: one, feature: one },
        );
        list.constant("output_norm.weight", h, 1.0);
        let turning = Content::Turning { first: self.turning };
        list.push("rope_freqs.weight", &[self.global.head_dim / 2], Type::F32, turning);
        for layer in 0..self.layers {
            self.layer(layer, &mut list);
        }
        list.tensors
    }
}

/// A vocabulary of the true size: the markers and bytes at their places, printable ASCII and the space's stand-in, and
/// fillers that no text becomes.
fn vocabulary(size: usize, writer: &mut Writer) -> skep_gguf::Result<()> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const USER_DEFINED: i32 = 4;
    const UNUSED: i32 = 5;
    const BYTE: i32 = 6;
    const BYTES: usize = 238;
    const SINGLES: usize = 236_743;
    let mut tokens: Vec<String> = (0..size).map(|id| format!("<filler-{id}>")).collect();
    let mut types = vec![UNUSED; size];
    let mut put = |id: usize, token: &str, ty: i32| {
        if id < size {
            tokens[id] = token.to_owned();
            types[id] = ty;
        }
    };
    for (id, token, ty) in [
        (0, "<pad>", CONTROL),
        (1, "<eos>", CONTROL),
        (2, "<bos>", CONTROL),
        (3, "<unk>", CONTROL),
        (4, "<mask>", CONTROL),
        (46, "<|tool>", CONTROL),
        (47, "<tool|>", CONTROL),
        (48, "<|tool_call>", USER_DEFINED),
        (49, "<tool_call|>", USER_DEFINED),
        (50, "<|tool_response>", USER_DEFINED),
        (51, "<tool_response|>", USER_DEFINED),
        (52, "<|\"|>", USER_DEFINED),
        (98, "<|think|>", CONTROL),
        (100, "<|channel>", USER_DEFINED),
        (101, "<channel|>", USER_DEFINED),
        (105, "<|turn>", CONTROL),
        (106, "<turn|>", CONTROL),
        (107, "\n", NORMAL),
        (255_999, "<|image>", CONTROL),
        (258_880, "<|image|>", CONTROL),
        (258_882, "<image|>", CONTROL),
    ] {
        put(id, token, ty);
    }
    for byte in 0..=255_usize {
        put(BYTES + byte, &format!("<0x{byte:02X}>"), BYTE);
    }
    for (id, single) in (SINGLES..).zip(std::iter::once('▁').chain('!'..='~')) {
        put(id, single.encode_utf8(&mut [0; 4]), NORMAL);
    }
    writer.set("tokenizer.ggml.model", ARCHITECTURE)?;
    writer.set("tokenizer.ggml.tokens", tokens)?;
    writer.set("tokenizer.ggml.scores", vec![-1000.0_f32; size])?;
    writer.set("tokenizer.ggml.token_type", types)?;
    writer.set("tokenizer.ggml.merges", Vec::<String>::new())?;
    for (name, id) in [("bos", 2_u32), ("eos", 1), ("unknown", 3), ("padding", 0), ("mask", 4)] {
        writer.set(&format!("tokenizer.ggml.{name}_token_id"), id)?;
    }
    writer.set("tokenizer.ggml.add_bos_token", true)?;
    writer.set("tokenizer.ggml.add_space_prefix", false)?;
    writer.set(
        "tokenizer.chat_template",
        "{{ bos_token }}{% for m in messages %}\
         {{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}\
         {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
         {{ '<|image|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ '<turn|>\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}",
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_model_has_the_parameters_that_its_name_says() {
        let tensors = GEMMA4_26B_A4B.tensors();
        let total: usize = tensors.iter().map(Planned::values).sum();
        assert_eq!(total / 100_000_000, 252, "{total} parameters");
        let experts: usize =
            tensors.iter().filter(|t| t.name.contains("_exps.weight")).map(Planned::values).sum();
        let active = total - experts + experts * 8 / 128;
        assert_eq!(active / 100_000_000, 38, "{active} active parameters");
    }

    #[test]
    fn every_row_fills_its_blocks() {
        for layers in [1, 2, 6, 7, 30] {
            for tensor in (Gemma { layers, ..GEMMA4_26B_A4B }).tensors() {
                assert!(
                    tensor.ty.row_bytes(tensor.cols()).is_some(),
                    "{} of {} columns",
                    tensor.name,
                    tensor.cols()
                );
            }
        }
    }

    #[test]
    fn a_cut_keeps_the_pattern_and_ends_globally() {
        let global = |layers: usize| -> Vec<usize> {
            let cut = Gemma { layers, ..GEMMA4_26B_A4B };
            let values = cut.tensors();
            let has_values =
                |layer: usize| values.iter().any(|t| t.name == format!("blk.{layer}.attn_v.weight"));
            (0..layers).filter(|&layer| !has_values(layer)).collect()
        };
        assert_eq!(global(30), [5, 11, 17, 23, 29]);
        assert_eq!(global(8), [5, 7]);
        assert_eq!(global(1), [0]);
    }
}
