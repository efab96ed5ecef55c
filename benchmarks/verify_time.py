"""Time of ``compile(verify=True)`` compared with compiling without verification.

    python -m benchmarks.verify_time [--models GPT-2 ...] [--repeats 3] [--write]

One process, no process group; compiled for 2 ranks. CPU time, because both run in one thread;
compilations and proofs alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from benchmarks.performance import keep
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.verification.proof import prove
from sp_compiler.verification.verify import Step

_SHAPE = 2, 12
_WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "GPT-2, hidden 768, vocabulary 8,000": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 768, "n_head": 12, "n_layer": 2, "vocab_size": 8000},
    ),
    "Llama, hidden 512, vocabulary 32,000": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
        },
    ),
    "Mixtral, hidden 256, 8 layers, 8 experts": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_WIDE, "num_key_value_heads": 2, "num_hidden_layers": 8, "vocab_size": 1000},
    ),
    "Mixtral that gathers weights per token": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            **_WIDE,
            "num_key_value_heads": 2,
            "num_hidden_layers": 8,
            "vocab_size": 1000,
            "experts_implementation": "batched_mm",
        },
    ),
    "BERT, hidden 256": (
        "BertConfig",
        "BertForMaskedLM",
        {**_WIDE, "num_hidden_layers": 2, "vocab_size": 1000},
    ),
    "T5, hidden 256": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 256,
            "d_ff": 1024,
            "num_heads": 4,
            "num_layers": 2,
            "vocab_size": 1000,
            "decoder_start_token_id": 0,
        },
    ),
    "Mamba, hidden 256": (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1000},
    ),
    "ViT, hidden 256": (
        "ViTConfig",
        "ViTForImageClassification",
        {**_WIDE, "num_hidden_layers": 2, "image_size": 64, "patch_size": 16},
    ),
}
"""Classes of the configuration and the model, and fields."""


def model_and_inputs(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model of the table, and the arguments of a call."""
    config_class, model_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**fields, attn_implementation="eager")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).train()
    if model_class == "ViTForImageClassification":
        size = config.image_size
        return model, {
            "pixel_values": torch.randn(2, 3, size, size),
            "labels": torch.ones(2).long(),
        }
    ids = torch.randint(2, config.vocab_size, _SHAPE)
    return model, {"input_ids": ids, "labels": ids}


def cpu_seconds(name: str, repeats: int) -> dict[str, float]:
    """The minimum CPU seconds of a compilation and of its proof."""
    model, inputs = model_and_inputs(name)
    options = CompileOptions(tp=2)
    compiling, proving = [], []
    for _ in range(repeats + 1):
        start = time.process_time()
        compiled = build(model, (), inputs, options, keep="unsharded")
        middle = time.process_time()
        prove(Step.of(model, (), inputs), options, compiled)
        compiling.append(middle - start)
        proving.append(time.process_time() - middle)
    # The first pays for imports and caches.
    return {"compile": min(compiling[1:]), "verify": min(proving[1:])}


def main() -> None:
    """Print CPU seconds by model; keep them if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in MODELS:
        if name.startswith(tuple(options.models)):
            seconds = cpu_seconds(name, options.repeats)
            rows.append({"model": name, **seconds})
            compiling, ratio = seconds["compile"], seconds["verify"] / seconds["compile"]
            print(f"{name}: {compiling:.2f} s, verify=True adds {ratio:.2f} of it", flush=True)
    if options.write:
        keep("verify_time", "verify", rows, shape=_SHAPE)


if __name__ == "__main__":
    main()
