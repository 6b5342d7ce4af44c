use super::config::{Config, LayerShape};
use crate::error::{Error, Result};
use crate::experts::ExpertWeights;
use crate::store::{Claims, Weight};

/// Every tensor by its role.
pub(crate) struct Weights {
    pub(crate) embedding: Weight,
    pub(crate) output_norm: Vec<f32>,
    /// The output head; the embedding where the file ties them.
    pub(crate) head: Weight,
    /// Divisors of the rope frequencies of layers that see everything; empty if there is no such layer.
    pub(crate) rope_divisors: Vec<f32>,
    pub(crate) per_layer: Option<PerLayer>,
    pub(crate) layers: Vec<Layer>,
}

/// What makes the embeddings that every layer has of its own.
pub(crate) struct PerLayer {
    /// `[n_vocab, layers · size]`
    pub(crate) embedding: Weight,
    /// `[layers · size, hidden]`, over the token embedding.
    pub(crate) projection: Weight,
    pub(crate) norm: Vec<f32>,
}

/// One layer.
pub(crate) struct Layer {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) q: Weight,
    pub(crate) q_norm: Vec<f32>,
    /// None where the layer reads the keys and values of another.
    pub(crate) kv: Option<KeyValue>,
    pub(crate) out: Weight,
    pub(crate) post_attention_norm: Vec<f32>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) gate: Weight,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
    pub(crate) moe: Option<Moe>,
    pub(crate) post_ffn_norm: Vec<f32>,
    pub(crate) per_layer: Option<PerLayerInput>,
    /// Multiplies the layer's output; 1 without one.
    pub(crate) output_scale: f32,
}

pub(crate) struct KeyValue {
    pub(crate) k: Weight,
    pub(crate) k_norm: Vec<f32>,
    /// None where the values are the keys as projected.
    pub(crate) v: Option<Weight>,
}

/// The experts beside the dense branch.
pub(crate) struct Moe {
    pub(crate) router: Weight,
    /// `[hidden]`, with hidden^-1/2 multiplied in: the weight of the router's norm.
    pub(crate) router_norm: Vec<f32>,
    /// A factor for each expert's share.
    pub(crate) expert_scale: Vec<f32>,
    pub(crate) experts: ExpertWeights,
    pub(crate) norm: Vec<f32>,
    pub(crate) post_dense_norm: Vec<f32>,
    pub(crate) post_norm: Vec<f32>,
}

/// How a layer takes in its own embedding.
pub(crate) struct PerLayerInput {
    /// `[size, hidden]`
    pub(crate) gate: Weight,
    /// `[hidden, size]`
    pub(crate) projection: Weight,
    pub(crate) post_norm: Vec<f32>,
}

impl Weights {
    pub(crate) fn claim<B: AsRef<[u8]>>(config: &Config, claims: &mut Claims<'_, B>) -> Result<Self> {
        let Config { hidden, vocab, .. } = *config;
        let embedding = claims.matrix("token_embd.weight", vocab, hidden)?;
        let head = match claims.has("output.weight") {
            true => claims.matrix("output.weight", vocab, hidden)?,
            false => embedding,
        };
        let output_norm = claims.vector("output_norm.weight", hidden)?;
        let rope_divisors = match config.layers.iter().all(|layer| layer.sliding) {
            true => Vec::new(),
            false => claims.vector("rope_freqs.weight", config.full_rope.dims / 2)?,
        };
        let per_layer = match config.per_layer {
            None => None,
            Some(size) => {
                let all = size.checked_mul(config.layers.len()).ok_or_else(|| {
                    Error::model(format_args!("per-layer embeddings of {size} numbers are too long"))
                })?;
                Some(PerLayer {
                    embedding: claims.matrix("per_layer_token_embd.weight", vocab, all)?,
                    projection: claims.matrix("per_layer_model_proj.weight", all, hidden)?,
                    norm: claims.vector("per_layer_proj_norm.weight", size)?,
                })
            }
        };
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(index, shape)| Layer::claim(config, *shape, claims, index))
            .collect::<Result<_>>()?;
        Ok(Self { embedding, output_norm, head, rope_divisors, per_layer, layers })
    }

    /// Every matrix with the share of it that one token reads: all of a dense one, the chosen experts of a bank, one row of
    /// an embedding.
    pub(crate) fn active_bytes(&self, config: &Config) -> u64 {
        let row = |table: &Weight| table.bytes() / config.vocab.max(1) as u64;
        let layers: u64 = self.layers.iter().map(|layer| layer.active_bytes(config)).sum();
        let per_layer = self.per_layer.as_ref().map_or(0, |per_layer| {
            row(&per_layer.embedding) + per_layer.projection.bytes() + floats(&[&per_layer.norm])
        });
        layers + per_layer + row(&self.embedding) + self.head.bytes() + floats(&[&self.output_norm])
    }
}

impl Layer {
    fn claim<B: AsRef<[u8]>>(
        config: &Config,
        shape: LayerShape,
        claims: &mut Claims<'_, B>,
        index: usize,
    ) -> Result<Self> {
        let name = |role: &str| format!("blk.{index}.{role}");
        let hidden = config.hidden;
        let LayerShape { q_heads, kv_heads, head_dim, ff, .. } = shape;
        let (q_rows, kv_rows) = (q_heads * head_dim, kv_heads * head_dim);
        let kv = match shape.owns_cache {
            true => {
                let (k, k_norm) = (
                    claims.matrix(&name("attn_k.weight"), kv_rows, hidden)?,
                    claims.vector(&name("attn_k_norm.weight"), head_dim)?,
                );
                let value = name("attn_v.weight");
                // Only layers that see everything may lack it.
                let v = match claims.has(&value) || shape.sliding {
                    true => Some(claims.matrix(&value, kv_rows, hidden)?),
                    false => None,
                };
                Some(KeyValue { k, k_norm, v })
            }
            false => {
                for role in ["attn_k.weight", "attn_k_norm.weight", "attn_v.weight"] {
                    if claims.has(&name(role)) {
                        claims.set_aside(&name(role))?;
                    }
                }
                None
            }
        };
        let moe = match config.moe {
            None => None,
            Some(moe) => {
                let norm_weight = claims.vector(&name("ffn_gate_inp.scale"), hidden)?;
                let scale = (hidden as f32).sqrt().recip();
                Some(Moe {
                    router: claims.matrix(&name("ffn_gate_inp.weight"), moe.experts, hidden)?,
                    router_norm: norm_weight.into_iter().map(|weight| weight * scale).collect(),
                    expert_scale: claims.vector(&name("ffn_down_exps.scale"), moe.experts)?,
                    experts: ExpertWeights::claim(claims, &name, moe.experts, moe.ff, hidden)?,
                    norm: claims.vector(&name("pre_ffw_norm_2.weight"), hidden)?,
                    post_dense_norm: claims.vector(&name("post_ffw_norm_1.weight"), hidden)?,
                    post_norm: claims.vector(&name("post_ffw_norm_2.weight"), hidden)?,
                })
            }
        };
        let per_layer = match config.per_layer {
            None => None,
            Some(size) => Some(PerLayerInput {
                gate: claims.matrix(&name("inp_gate.weight"), size, hidden)?,
                projection: claims.matrix(&name("proj.weight"), hidden, size)?,
                post_norm: claims.vector(&name("post_norm.weight"), hidden)?,
            }),
        };
        let scale = name("layer_output_scale.weight");
        let output_scale = match claims.has(&scale) {
            true => claims.vector(&scale, 1)?[0],
            false => 1.0,
        };
        Ok(Self {
            attn_norm: claims.vector(&name("attn_norm.weight"), hidden)?,
            q: claims.matrix(&name("attn_q.weight"), q_rows, hidden)?,
            q_norm: claims.vector(&name("attn_q_norm.weight"), head_dim)?,
            kv,
            out: claims.matrix(&name("attn_output.weight"), hidden, q_rows)?,
            post_attention_norm: claims.vector(&name("post_attention_norm.weight"), hidden)?,
            ffn_norm: claims.vector(&name("ffn_norm.weight"), hidden)?,
            gate: claims.matrix(&name("ffn_gate.weight"), ff, hidden)?,
            up: claims.matrix(&name("ffn_up.weight"), ff, hidden)?,
            down: claims.matrix(&name("ffn_down.weight"), hidden, ff)?,
            moe,
            post_ffn_norm: claims.vector(&name("post_ffw_norm.weight"), hidden)?,
            per_layer,
            output_scale,
        })
    }

    fn active_bytes(&self, config: &Config) -> u64 {
        let mut matrices = vec![&self.q, &self.out, &self.gate, &self.up, &self.down];
        let mut vectors = vec![
            &self.attn_norm,
            &self.q_norm,
            &self.post_attention_norm,
            &self.ffn_norm,
            &self.post_ffn_norm,
        ];
        let mut experts = 0;
        if let Some(kv) = &self.kv {
            matrices.push(&kv.k);
            matrices.extend(&kv.v);
            vectors.push(&kv.k_norm);
        }
        if let (Some(moe), Some(sizes)) = (&self.moe, config.moe) {
            matrices.push(&moe.router);
            let norms =
                [&moe.router_norm, &moe.expert_scale, &moe.norm, &moe.post_dense_norm, &moe.post_norm];
            vectors.extend(norms);
            experts = moe.experts.active_bytes(sizes.experts, sizes.used);
        }
        if let Some(input) = &self.per_layer {
            matrices.extend([&input.gate, &input.projection]);
            vectors.push(&input.post_norm);
        }
        matrices.iter().map(|weight| weight.bytes()).sum::<u64>() + floats(&vectors) + experts
    }
}

fn floats(vectors: &[&Vec<f32>]) -> u64 {
    vectors.iter().map(|vector| 4 * vector.len() as u64).sum()
}
