//! Qwen3.6: gated DeltaNet in most layers, attention in every fourth, experts in all.

use super::plan::{Content, List, Planned, Q4_K_M, Shapes, general, more_bits};
use skep_engine::tokenizer::char_of;
use skep_gguf::Writer;
use skep_quant::Type;

/// The sizes of a model.
#[derive(Debug, Clone)]
pub(crate) struct Qwen {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    pub(crate) context: u32,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) rope_dims: usize,
    pub(crate) rope_sections: [i32; 4],
    pub(crate) rope_base: f32,
    pub(crate) experts: usize,
    pub(crate) experts_used: usize,
    pub(crate) expert_ff: usize,
    pub(crate) k_heads: usize,
    pub(crate) v_heads: usize,
    pub(crate) state_dim: usize,
    pub(crate) conv_kernel: usize,
    pub(crate) interval: usize,
}

/// Qwen3.6-35B-A3B, sizes as its published configuration gives them.
pub(crate) const QWEN36_35B_A3B: Qwen = Qwen {
    layers: 40,
    hidden: 2048,
    vocab: 248_320,
    context: 262_144,
    q_heads: 16,
    kv_heads: 2,
    head_dim: 256,
    rope_dims: 64,
    rope_sections: [11, 11, 10, 0],
    rope_base: 1e7,
    experts: 256,
    experts_used: 8,
    expert_ff: 512,
    k_heads: 16,
    v_heads: 32,
    state_dim: 128,
    conv_kernel: 4,
    interval: 4,
};

impl Qwen {
    fn key_dim(&self) -> usize {
        self.k_heads * self.state_dim
    }

    fn value_dim(&self) -> usize {
        self.v_heads * self.state_dim
    }

    fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }

    fn is_recurrent(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.interval)
    }

    fn layer(&self, layer: usize, list: &mut List) {
        let name = |role: &str| format!("blk.{layer}.{role}");
        let more = if more_bits(layer, self.layers) { Type::Q6_K } else { Type::Q4_K };
        let Self { hidden: h, experts, expert_ff: ff, .. } = *self;
        list.push(name("attn_norm.weight"), &[h], Type::F32, Content::Constant(1.0));
        if self.is_recurrent(layer) {
            let (value_dim, v_heads) = (self.value_dim(), self.v_heads);
            list.random(name("attn_qkv.weight"), &[h, self.conv_dim()], more, false);
            list.random(name("attn_gate.weight"), &[h, value_dim], Type::Q4_K, false);
            list.random(name("ssm_beta.weight"), &[h, v_heads], Type::Q4_K, false);
            list.random(name("ssm_alpha.weight"), &[h, v_heads], Type::Q4_K, false);
            let conv = Content::Random { std: 0.5, residual: false };
            list.push(name("ssm_conv1d.weight"), &[self.conv_kernel, self.conv_dim()], Type::F32, conv);
            list.push(name("ssm_a"), &[v_heads], Type::F32, Content::Decays);
            list.push(name("ssm_dt.bias"), &[v_heads], Type::F32, Content::Constant(0.0));
            list.push(name("ssm_norm.weight"), &[self.state_dim], Type::F32, Content::Constant(1.0));
            list.random(name("ssm_out.weight"), &[value_dim, h], Type::Q4_K, true);
        } else {
            let (q, kv) = (self.q_heads * self.head_dim, self.kv_heads * self.head_dim);
            list.random(name("attn_q.weight"), &[h, 2 * q], Type::Q4_K, false);
            list.random(name("attn_k.weight"), &[h, kv], Type::Q4_K, false);
            list.random(name("attn_v.weight"), &[h, kv], more, false);
            list.push(name("attn_q_norm.weight"), &[self.head_dim], Type::F32, Content::Constant(1.0));
            list.push(name("attn_k_norm.weight"), &[self.head_dim], Type::F32, Content::Constant(1.0));
            list.random(name("attn_output.weight"), &[q, h], Type::Q4_K, true);
        }
        list.push(name("post_attention_norm.weight"), &[h], Type::F32, Content::Constant(1.0));
        let router = Content::Router { std: (h as f32).sqrt().recip() };
        list.push(name("ffn_gate_inp.weight"), &[h, experts], Type::F32, router);
        list.random(name("ffn_gate_exps.weight"), &[h, ff, experts], Type::Q4_K, false);
        list.random(name("ffn_up_exps.weight"), &[h, ff, experts], Type::Q4_K, false);
        list.random(name("ffn_down_exps.weight"), &[ff, h, experts], more, true);
        list.random(name("ffn_gate_inp_shexp.weight"), &[h], Type::F32, false);
        list.random(name("ffn_gate_shexp.weight"), &[h, ff], Type::Q4_K, false);
        list.random(name("ffn_up_shexp.weight"), &[h, ff], Type::Q4_K, false);
        list.random(name("ffn_down_shexp.weight"), &[ff, h], more, true);
    }
}

impl Shapes for Qwen {
    fn metadata(&self, writer: &mut Writer) -> skep_gguf::Result<()> {
        const ARCHITECTURE: &str = "qwen35moe";
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        general(writer, ARCHITECTURE, "qwen3.6-35b-a3b", self.layers, Q4_K_M)?;
        let inner = self.value_dim();
        for (name, value) in [
            ("block_count", self.layers),
            ("embedding_length", self.hidden),
            ("attention.head_count", self.q_heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.rope_dims),
            ("expert_count", self.experts),
            ("expert_used_count", self.experts_used),
            ("expert_feed_forward_length", self.expert_ff),
            ("expert_shared_feed_forward_length", self.expert_ff),
            ("full_attention_interval", self.interval),
            ("ssm.conv_kernel", self.conv_kernel),
            ("ssm.state_size", self.state_dim),
            ("ssm.group_count", self.k_heads),
            ("ssm.time_step_rank", self.v_heads),
            ("ssm.inner_size", inner),
        ] {
            writer.set(&key(name), value as u32)?;
        }
        writer.set(&key("context_length"), self.context)?;
        writer.set(&key("attention.layer_norm_rms_epsilon"), 1e-6_f32)?;
        writer.set(&key("rope.freq_base"), self.rope_base)?;
        writer.set(&key("rope.dimension_sections"), self.rope_sections)?;
        let recurrent: Vec<bool> = (0..self.layers).map(|layer| self.is_recurrent(layer)).collect();
        writer.set(&key("attention.recurrent_layers"), recurrent)?;
        vocabulary(self.vocab, writer)
    }

    fn tensors(&self) -> Vec<Planned> {
        let mut list = List::default();
        let (h, vocab) = (self.hidden, self.vocab);
        list.push(
            "token_embd.weight",
            &[h, vocab],
            Type::Q4_K,
            Content::Embedding { std: 0.25, feature: 1.0 },
        );
        list.push("output_norm.weight", &[h], Type::F32, Content::Constant(1.0));
        list.random("output.weight", &[h, vocab], Type::Q6_K, false);
        for layer in 0..self.layers {
            self.layer(layer, &mut list);
        }
        list.tensors
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_model_has_the_parameters_that_its_name_says() {
        let parameters: usize = QWEN36_35B_A3B.tensors().iter().map(Planned::values).sum();
        assert_eq!(parameters / 10_000_000, 3466);
    }

    #[test]
    fn a_cut_of_eight_layers_is_of_the_size_of_the_real_one() {
        let bytes: usize = Qwen { layers: 8, ..QWEN36_35B_A3B }.tensors().iter().map(Planned::bytes).sum();
        assert!((4_700_000_000..4_900_000_000).contains(&bytes), "{bytes} bytes");
    }
}
