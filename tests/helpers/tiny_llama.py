"""A Llama of two small layers, as the configuration that HuggingFace saves beside weights."""

from __future__ import annotations

import json
from pathlib import Path


def write_config(folder: Path, **more: object) -> Path:
    """Write ``config.json`` with fields ``more`` into ``folder``, and return its path."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(fields | more), encoding="utf-8")
    return path
