"""Makes gemma4_sizes.npy: logits of two small Gemma 4 models of other sizes than the bundled one, by transformers 5.24 in f32.

    pip install torch transformers==5.24.0 && python gemma4_sizes.py

"e": per-layer embeddings, layers that share keys and values, a wider feed-forward there, as E2B and E4B have them.
"dense": no experts, keys for values on full layers, as 31B has it.
Weights are a function of the tensor's GGUF name and the index; gemma4_sizes.rs makes the same ones. Rows of the array: the 40
tokens of "e", then those of "dense".
"""

import numpy as np
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

VOCAB, TOKENS = 300, 40
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    global_head_dim=32, rms_norm_eps=1e-6, sliding_window=8, vocab_size_per_layer_input=VOCAB, max_position_embeddings=4096,
)
MODELS = {
    "e": dict(
        num_hidden_layers=7, layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], num_kv_shared_layers=3,
        use_double_wide_mlp=True, hidden_size_per_layer_input=16, final_logit_softcapping=30.0,
    ),
    "dense": dict(
        num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL], hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=1, final_logit_softcapping=None,
    ),
}
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}
GLOBAL = {
    "embed_tokens": "token_embd", "norm": "output_norm", "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj", "per_layer_projection_norm": "per_layer_proj_norm",
}
MASK = (1 << 64) - 1


def gguf_name(key):
    key = key.removeprefix("model.")
    if not key.startswith("layers."):
        return GLOBAL[key.removesuffix(".weight")] + ".weight"
    _, layer, rest = key.split(".", 2)
    if rest == "layer_scalar":
        return f"blk.{layer}.layer_output_scale.weight"
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def spread(name, cols):
    """Middle and half-width of a tensor's values."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.5, 0.25
    if "norm" in name or "output_scale" in name:
        return 1.0, 0.25
    return 0.0, 1.5 / cols**0.5


def values(name, shape):
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    n, middle, width = int(np.prod(shape)), *spread(name, shape[-1])
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    return (np.float32(middle) + np.float32(width) * unit).reshape(shape)


rows = []
for sizes in MODELS.values():
    model = Gemma4ForCausalLM(Gemma4TextConfig(**COMMON, **sizes)).float().eval()
    model.config._attn_implementation = "eager"
    state = {key: torch.from_numpy(values(gguf_name(key), tuple(t.shape))) for key, t in model.state_dict().items() if key != "lm_head.weight"}
    print(model.load_state_dict(state, strict=False))
    model.tie_weights()
    ids = torch.tensor([[2] + [(7 * i * i + 3 * i) % VOCAB for i in range(1, TOKENS)]])
    with torch.no_grad():
        rows.append(model(input_ids=ids).logits[0].numpy())
np.save("gemma4_sizes.npy", np.concatenate(rows).astype(np.float32))
