"""Decoder-only language models."""

from __future__ import annotations

import functools

from transformers.models.qwen3_next import modeling_qwen3_next

from tests.models.architecture import LAYERS, add

# The scan within a chunk is a loop in Python: of 64 tokens, which is the default and more than any
# sequence here has, it is unrolled into four times as many operators of the same kinds.
modeling_qwen3_next.torch_chunk_gated_delta_rule = functools.partial(
    modeling_qwen3_next.torch_chunk_gated_delta_rule, chunk_size=16
)

add("gpt2", "GPT2", lambda s: {"loss_type": "ForCausalLM"}, model="LMHeadModel")
add("llama", "Llama")
add("mistral", "Mistral", lambda s: {"sliding_window": 5})
add("qwen2", "Qwen2")
add("qwen3", "Qwen3", lambda s: {"head_dim": s.head})
add("gemma", "Gemma", lambda s: {"head_dim": s.head})
add(
    "gemma2",
    "Gemma2",
    lambda s: {"head_dim": s.head, "sliding_window": 5, "query_pre_attn_scalar": s.head},
    attention="eager",
)
add(
    "gemma3_text",
    "Gemma3",
    lambda s: {
        "head_dim": s.head, "sliding_window": 5, "query_pre_attn_scalar": s.head,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    config="Gemma3TextConfig",
)  # fmt: skip
add("phi", "Phi", lambda s: {"partial_rotary_factor": 0.5})
add("phi3", "Phi3", lambda s: {"pad_token_id": 0})
add("opt", "OPT", lambda s: {"ffn_dim": s.ffn, "word_embed_proj_dim": s.hidden, "pad_token_id": 1})
add("bloom", "Bloom", lambda s: {"n_layer": LAYERS, "n_head": s.heads}, attention="eager")
add("falcon", "Falcon", lambda s: {"num_kv_heads": s.kv, "new_decoder_architecture": True})
add("gpt_neox", "GPTNeoX", lambda s: {"rotary_pct": 0.5})
add("gptj", "GPTJ", lambda s: {"rotary_dim": 4, "n_inner": s.ffn}, attention="eager")
add(
    "gpt_neo",
    "GPTNeo",
    lambda s: {
        "num_layers": LAYERS, "num_heads": s.heads, "window_size": 5,
        "attention_types": [[["global", "local"], 1]],
    },
    attention="eager",
)  # fmt: skip
add("codegen", "CodeGen", lambda s: {"rotary_dim": 4, "n_inner": s.ffn}, attention="eager")
add("mpt", "Mpt", lambda s: {"expansion_ratio": 2, "max_seq_len": 64}, attention="eager")
add("stablelm", "StableLm", lambda s: {"partial_rotary_factor": 0.5})
add("starcoder2", "Starcoder2")
add("olmo", "Olmo")
add("olmo2", "Olmo2")
add("cohere", "Cohere")
add("granite", "Granite")
add(
    "mixtral",
    "Mixtral",
    lambda s: {"num_local_experts": s.experts, "output_router_logits": True},
)
add(
    "qwen2_moe",
    "Qwen2Moe",
    lambda s: {
        "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.ffn,
        "shared_expert_intermediate_size": s.ffn, "output_router_logits": True,
    },
    experts="batched_mm",
)  # fmt: skip
add(
    "qwen3_moe",
    "Qwen3Moe",
    lambda s: {
        "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.ffn,
        "head_dim": s.head,
    },
)  # fmt: skip
add(
    "deepseek_v3",
    "DeepseekV3",
    lambda s: {
        "num_key_value_heads": s.heads, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
        "topk_group": 1, "n_routed_experts": s.experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ffn, "first_k_dense_replace": 1,
    },
)  # fmt: skip
add(
    "gpt_oss",
    "GptOss",
    lambda s: {
        "head_dim": s.head, "num_local_experts": s.experts, "num_experts_per_tok": 2,
        "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    attention="eager",
)  # fmt: skip
add("mamba", "Mamba", lambda s: {"state_size": 4, "expand": 2}, attention="eager")
add(
    "xglm",
    "XGLM",
    lambda s: {
        "d_model": s.hidden, "ffn_dim": s.ffn, "num_layers": LAYERS, "attention_heads": s.heads,
        "pad_token_id": 1,
    },
    attention="eager",
)  # fmt: skip
add("biogpt", "BioGpt", lambda s: {"pad_token_id": 1})
add(
    "llama4_text",
    "Llama4",
    lambda s: {
        "head_dim": s.head, "num_local_experts": s.experts, "intermediate_size_mlp": s.ffn,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
    },
    config="Llama4TextConfig",
)  # fmt: skip
add("gpt_bigcode", "GPTBigCode")
add(
    "qwen3_next",
    "Qwen3Next",
    lambda s: {
        "head_dim": s.head, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": s.heads, "linear_num_key_heads": s.kv, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": s.experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ffn, "shared_expert_intermediate_size": s.ffn,
        "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
