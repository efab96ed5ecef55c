"""x-transformers, torchtune, LitGPT, torchtitan, fair-esm: models of tokens."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.third_party.entry import Entry, Inputs, tokens

_X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "t5_relative_bias": {"rel_pos_bias": True},
    "rmsnorm_swiglu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "simple_rmsnorm": {"use_simple_rmsnorm": True},
    "grouped_queries": {"attn_kv_heads": 2},
    "one_key_head": {"attn_one_kv_head": True},
    "qk_norm": {"attn_qk_norm": True},
    "qk_norm_per_head": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "talking_heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "memory_keys": {"attn_num_mem_kv": 4},
    "gated_values": {"attn_gate_values": True},
    "sandwich_norm": {"sandwich_norm": True},
    "post_norm_residual_scale": {"pre_norm": False, "scale_residual": True},
    "macaron": {"macaron": True},
    "residual_attention": {"residual_attn": True},
    "shifted_tokens": {"shift_tokens": 1},
    "relu_squared": {"ff_relu_squared": True},
    "flash": {"attn_flash": True},
    "laser": {"attn_laser": True},
    "hyper_connections": {"num_residual_streams": 2},
    "value_residual": {"add_value_residual": True},
}


def _x_transformer(options: dict[str, Any]) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)


def x_transformers_entries() -> list[Entry]:
    """The features of x-transformers, one at a time."""
    return [
        Entry("x-transformers", name, lambda o=options: _x_transformer(o), tokens())  # type: ignore[misc]
        for name, options in _X_TRANSFORMERS.items()
    ]


def _torchtune(name: str) -> Any:
    from torchtune.models import gemma, llama3, mistral, phi3, qwen2

    sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 16}
    wide = {**sizes, "intermediate_dim": 128}
    if name == "gemma":
        return gemma.gemma(**wide, num_kv_heads=1, head_dim=16)
    builders = {
        "llama3": (llama3.llama3, sizes),
        "mistral": (mistral.mistral, wide),
        "phi3": (phi3.phi3, wide),
        "qwen2": (qwen2.qwen2, wide),
    }
    builder, options = builders[name]
    return builder(**options, num_kv_heads=2)


def torchtune_entries() -> list[Entry]:
    """torchtune's decoders."""
    return [
        Entry("torchtune", name, lambda n=name: _torchtune(n), tokens())  # type: ignore[misc]
        for name in ("llama3", "mistral", "phi3", "qwen2", "gemma")
    ]


_LITGPT: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "Llama-3.2-1B": {"n_query_groups": 2},
    "gemma-2b": {"n_query_groups": 1},
    "Gemma-2-2b": {"n_query_groups": 2},
    "falcon-7b": {"n_query_groups": 1},
    "phi-2": {},
    "Qwen3-0.6B": {"n_query_groups": 2},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "n_expert": 4},
}


def _litgpt(name: str, options: dict[str, Any]) -> Any:
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "head_size": 16, "intermediate_size": 128}
    return GPT(Config.from_name(name, **sizes, padded_vocab_size=64, block_size=16, **options))


def litgpt_entries() -> list[Entry]:
    """LitGPT's one model in the configurations of others."""
    return [
        Entry("litgpt", name, lambda n=name, o=options: _litgpt(n, o), tokens())  # type: ignore[misc]
        for name, options in _LITGPT.items()
    ]


def _esm2() -> Any:
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=64, attention_heads=4, token_dropout=False)


def _residues() -> Inputs:
    return (torch.randint(4, 24, (2, 12)),), {}


def esm_entries() -> list[Entry]:
    """ESM-2, a model of proteins, which branches on whether anything is padded."""
    return [Entry("fair-esm", "ESM2", _esm2, _residues)]
