//! The tensors of a synthetic model: names, shapes, types and the spread of their values.

use skep_quant::Type;

/// The sizes of a model.
#[derive(Debug, Clone)]
pub(crate) struct Preset {
    pub(crate) architecture: &'static str,
    pub(crate) name: &'static str,
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
pub(crate) const QWEN36_35B_A3B: Preset = Preset {
    architecture: "qwen35moe",
    name: "qwen3.6-35b-a3b",
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

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Content {
    /// The same number everywhere.
    Constant(f32),
    /// Decay rates between -0.5 and -0.005.
    Decays,
    /// The token embedding: random, but for one feature that is the same for every token.
    Embedding,
    /// Random with this standard deviation; outputs into the residual stream leave its first feature alone.
    Random { std: f32, residual: bool },
    /// Router rows: random, and with a skew that reads the constant first feature.
    Router { std: f32 },
}

/// One tensor to write.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) name: String,
    /// GGUF order: columns first.
    pub(crate) shape: Vec<u64>,
    pub(crate) ty: Type,
    pub(crate) content: Content,
}

impl Planned {
    pub(crate) fn cols(&self) -> usize {
        self.shape[0] as usize
    }

    pub(crate) fn rows(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }
}

impl Preset {
    pub(crate) fn key_dim(&self) -> usize {
        self.k_heads * self.state_dim
    }

    pub(crate) fn value_dim(&self) -> usize {
        self.v_heads * self.state_dim
    }

    pub(crate) fn conv_dim(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }

    pub(crate) fn is_recurrent(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.interval)
    }

    /// Every tensor, in file order, with the types that llama.cpp's Q4_K_M mix gives them.
    pub(crate) fn tensors(&self) -> Vec<Planned> {
        let mut list = List { tensors: Vec::new() };
        let (h, vocab) = (self.hidden, self.vocab);
        list.push("token_embd.weight", &[h, vocab], Type::Q4_K, Content::Embedding);
        list.push("output_norm.weight", &[h], Type::F32, Content::Constant(1.0));
        list.random("output.weight", &[h, vocab], Type::Q6_K, false);
        for layer in 0..self.layers {
            self.layer(layer, &mut list);
        }
        list.tensors
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

/// Whether the Q4_K_M mix gives a layer's values and down-projections the larger type.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

struct List {
    tensors: Vec<Planned>,
}

impl List {
    fn push(&mut self, name: impl Into<String>, shape: &[usize], ty: Type, content: Content) {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        self.tensors.push(Planned { name: name.into(), shape, ty, content });
    }

    /// Random values that keep the scale of their input.
    fn random(&mut self, name: impl Into<String>, shape: &[usize], ty: Type, residual: bool) {
        let std = (shape[0] as f32).sqrt().recip();
        self.push(name, shape, ty, Content::Random { std, residual });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_model_has_the_parameters_that_its_name_says() {
        let parameters: usize = QWEN36_35B_A3B.tensors().iter().map(|t| t.cols() * t.rows()).sum();
        assert_eq!(parameters / 10_000_000, 3466);
    }

    #[test]
    fn a_cut_of_eight_layers_is_of_the_size_of_the_real_one() {
        let cut = Preset { layers: 8, ..QWEN36_35B_A3B };
        let bytes: usize = cut.tensors().iter().map(|t| t.ty.row_bytes(t.cols()).unwrap() * t.rows()).sum();
        assert!((4_700_000_000..4_900_000_000).contains(&bytes), "{bytes} bytes");
    }
}
