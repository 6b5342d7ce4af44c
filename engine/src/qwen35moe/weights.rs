use super::Config;
use crate::error::{Error, Result};
use crate::experts::ExpertWeights;
use crate::store::{Claims, Weight};

/// Every tensor of the trunk by its role.
pub(crate) struct Weights {
    pub(crate) embedding: Weight,
    pub(crate) output_norm: Vec<f32>,
    /// The output head; the embedding where the file ties them.
    pub(crate) head: Weight,
    /// Whether the head is the embedding.
    pub(crate) tied: bool,
    pub(crate) layers: Vec<Layer>,
    /// Bytes of the draft block, which is kept aside.
    pub(crate) draft_bytes: u64,
}

/// One layer: `x += mixer(norm(x)); x += experts(norm(x))`.
pub(crate) struct Layer {
    pub(crate) mixer_norm: Vec<f32>,
    pub(crate) mixer: Mixer,
    pub(crate) moe_norm: Vec<f32>,
    pub(crate) router: Weight,
    pub(crate) experts: ExpertWeights,
    pub(crate) shared_gate: Weight,
    pub(crate) shared: SharedExpert,
}

/// The expert that every token passes.
pub(crate) struct SharedExpert {
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
}

/// How a layer mixes tokens.
#[allow(clippy::large_enum_variant, reason = "a few dozen of them, each used at every step")]
pub(crate) enum Mixer {
    Recurrent {
        qkv: Weight,
        z: Weight,
        beta: Weight,
        alpha: Weight,
        /// `[conv_dim, kernel]`
        conv: Vec<f32>,
        a: Vec<f32>,
        dt_bias: Vec<f32>,
        norm: Vec<f32>,
        out: Weight,
    },
    Attention {
        /// Per head: query rows, then gate rows.
        q: Weight,
        k: Weight,
        v: Weight,
        q_norm: Vec<f32>,
        k_norm: Vec<f32>,
        out: Weight,
    },
}

impl Weights {
    pub(crate) fn claim<B: AsRef<[u8]>>(config: &Config, claims: &mut Claims<'_, B>) -> Result<Self> {
        let embedding = claims.matrix("token_embd.weight", config.vocab, config.hidden)?;
        let tied = !claims.has("output.weight");
        let head = match tied {
            false => claims.matrix("output.weight", config.vocab, config.hidden)?,
            true => embedding,
        };
        let output_norm = claims.vector("output_norm.weight", config.hidden)?;
        let layers =
            (0..config.layers).map(|layer| Layer::claim(config, claims, layer)).collect::<Result<_>>()?;
        let draft_bytes = match config.draft {
            Some(block) => set_draft_aside(claims, block)?,
            None => 0,
        };
        Ok(Self { embedding, output_norm, head, tied, layers, draft_bytes })
    }

    /// Every matrix with the share of it that one token reads: all of a dense one, the chosen experts of a bank.
    pub(crate) fn active_bytes(&self, config: &Config) -> u64 {
        let dense: u64 = self.layers.iter().map(Layer::dense_bytes).sum();
        let experts: u64 = self
            .layers
            .iter()
            .map(|layer| layer.experts.active_bytes(config.experts, config.experts_used))
            .sum();
        let norms = 4 * self.output_norm.len() as u64;
        let row = self.embedding.bytes() / config.vocab.max(1) as u64;
        dense + experts + norms + row + self.head.bytes()
    }
}

impl Layer {
    fn claim<B: AsRef<[u8]>>(config: &Config, claims: &mut Claims<'_, B>, layer: usize) -> Result<Self> {
        let name = |role: &str| format!("blk.{layer}.{role}");
        let Config { hidden, experts, expert_ff, shared_ff, .. } = *config;
        let mixer_norm = claims.vector(&name("attn_norm.weight"), hidden)?;
        let mixer = match config.recurrent[layer] {
            true => Mixer::claim_recurrent(config, claims, &name)?,
            false => Mixer::claim_attention(config, claims, &name)?,
        };
        let moe_norm = claims.vector(&name("post_attention_norm.weight"), hidden)?;
        let router = claims.matrix(&name("ffn_gate_inp.weight"), experts, hidden)?;
        let experts = ExpertWeights::claim(claims, &name, experts, expert_ff, hidden)?;
        let shared_gate = claims.matrix(&name("ffn_gate_inp_shexp.weight"), 1, hidden)?;
        let shared = SharedExpert {
            gate: claims.matrix(&name("ffn_gate_shexp.weight"), shared_ff, hidden)?,
            up: claims.matrix(&name("ffn_up_shexp.weight"), shared_ff, hidden)?,
            down: claims.matrix(&name("ffn_down_shexp.weight"), hidden, shared_ff)?,
        };
        Ok(Self { mixer_norm, mixer, moe_norm, router, experts, shared_gate, shared })
    }

    fn dense_bytes(&self) -> u64 {
        let mixer = match &self.mixer {
            Mixer::Recurrent { qkv, z, beta, alpha, conv, a, dt_bias, norm, out } => {
                let floats = conv.len() + a.len() + dt_bias.len() + norm.len();
                [qkv, z, beta, alpha, out].iter().map(|weight| weight.bytes()).sum::<u64>()
                    + 4 * floats as u64
            }
            Mixer::Attention { q, k, v, q_norm, k_norm, out } => {
                let floats = q_norm.len() + k_norm.len();
                [q, k, v, out].iter().map(|weight| weight.bytes()).sum::<u64>() + 4 * floats as u64
            }
        };
        let SharedExpert { gate, up, down } = &self.shared;
        let rest: u64 =
            [&self.router, &self.shared_gate, gate, up, down].iter().map(|weight| weight.bytes()).sum();
        mixer + rest + 4 * (self.mixer_norm.len() + self.moe_norm.len()) as u64
    }
}

impl Mixer {
    fn claim_recurrent<B: AsRef<[u8]>>(
        config: &Config,
        claims: &mut Claims<'_, B>,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Self> {
        let shape = &config.gdn;
        let (hidden, v_heads) = (config.hidden, shape.v_heads());
        let a_name = name("ssm_a");
        let a = claims.vector(&a_name, v_heads)?;
        if let Some(bad) = a.iter().find(|value| !(value.is_finite() && **value < 0.0)) {
            return Err(Error::model(format_args!(
                "tensor {a_name} holds {bad}: decay rates must be finite and negative"
            )));
        }
        let (dt, dt_bias) = (name("ssm_dt"), name("ssm_dt.bias"));
        if claims.has(&dt) && claims.has(&dt_bias) {
            return Err(Error::model(format_args!(
                "both {dt} and {dt_bias} are present: they are two names of one tensor"
            )));
        }
        let dt_name = if claims.has(&dt) { dt } else { dt_bias };
        Ok(Self::Recurrent {
            qkv: claims.matrix(&name("attn_qkv.weight"), shape.conv_dim(), hidden)?,
            z: claims.matrix(&name("attn_gate.weight"), shape.value_dim(), hidden)?,
            beta: claims.matrix(&name("ssm_beta.weight"), v_heads, hidden)?,
            alpha: claims.matrix(&name("ssm_alpha.weight"), v_heads, hidden)?,
            conv: claims.vector(&name("ssm_conv1d.weight"), shape.conv_dim() * shape.conv_kernel())?,
            a,
            dt_bias: claims.vector(&dt_name, v_heads)?,
            norm: claims.vector(&name("ssm_norm.weight"), shape.head_v_dim())?,
            out: claims.matrix(&name("ssm_out.weight"), hidden, shape.value_dim())?,
        })
    }

    fn claim_attention<B: AsRef<[u8]>>(
        config: &Config,
        claims: &mut Claims<'_, B>,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Self> {
        let Config { hidden, q_heads, kv_heads, head_dim, .. } = *config;
        let (q_rows, kv_rows) = (2 * q_heads * head_dim, kv_heads * head_dim);
        let fused = name("attn_qkv.weight");
        let (q, k, v) = if claims.has(&fused) {
            let all = claims.matrix(&fused, q_rows + 2 * kv_rows, hidden)?;
            let k_end = q_rows + kv_rows;
            (all.rows(0..q_rows), all.rows(q_rows..k_end), all.rows(k_end..k_end + kv_rows))
        } else {
            (
                claims.matrix(&name("attn_q.weight"), q_rows, hidden)?,
                claims.matrix(&name("attn_k.weight"), kv_rows, hidden)?,
                claims.matrix(&name("attn_v.weight"), kv_rows, hidden)?,
            )
        };
        Ok(Self::Attention {
            q,
            k,
            v,
            q_norm: claims.vector(&name("attn_q_norm.weight"), head_dim)?,
            k_norm: claims.vector(&name("attn_k_norm.weight"), head_dim)?,
            out: claims.matrix(&name("attn_output.weight"), hidden, q_heads * head_dim)?,
        })
    }
}

/// Recognises the tensors of the draft block. They have roles, but the trunk does not read them.
fn set_draft_aside<B: AsRef<[u8]>>(claims: &mut Claims<'_, B>, block: usize) -> Result<u64> {
    const REQUIRED: [&str; 17] = [
        "attn_norm.weight",
        "attn_q.weight",
        "attn_k.weight",
        "attn_v.weight",
        "attn_q_norm.weight",
        "attn_k_norm.weight",
        "attn_output.weight",
        "post_attention_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_down_exps.weight",
        "ffn_gate_inp_shexp.weight",
        "ffn_gate_shexp.weight",
        "ffn_up_shexp.weight",
        "ffn_down_shexp.weight",
        "nextn.eh_proj.weight",
        "nextn.enorm.weight",
        "nextn.hnorm.weight",
    ];
    const OPTIONAL: [&str; 3] =
        ["nextn.shared_head_norm.weight", "nextn.embed_tokens.weight", "nextn.shared_head_head.weight"];
    let name = |role: &str| format!("blk.{block}.{role}");
    let experts: &[&str] = match claims.has(&name("ffn_gate_up_exps.weight")) {
        true => &["ffn_gate_up_exps.weight"],
        false => &["ffn_gate_exps.weight", "ffn_up_exps.weight"],
    };
    let mut bytes = 0;
    for role in REQUIRED.iter().chain(experts) {
        bytes += claims.set_aside(&name(role))?;
    }
    for role in OPTIONAL {
        if claims.has(&name(role)) {
            bytes += claims.set_aside(&name(role))?;
        }
    }
    Ok(bytes)
}
