"""Estimated steps with products that compute while their own rows cross the link.

    python -m benchmarks.async_tp [--hardware h100 a100] [--tp 8]

Two layers and the head of GPT-22B and GPT-3 175B (arXiv 2205.05198, table 3) and of Llama-3-70B, in
bfloat16 with 8192 tokens, as ``sp_compiler.plan`` estimates them: no kernel runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler
from benchmarks.models import PRESETS, PlainGPT
from sp_compiler.cost.hardware import profile_names

_LAYERS, _TOKENS, _SEQUENCE = 2, 8192, 2048
_WAYS = {
    "as it is": {},
    "async_tp": {"async_tp": True},
    "half batches": {"half_batches": True},
}


def _gpt(preset: str) -> nn.Module:
    return PlainGPT(replace(PRESETS[preset], num_layers=_LAYERS))


def _llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=_LAYERS,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT 22B": lambda: _gpt("gpt-22b"),
    "GPT-3 175B": lambda: _gpt("gpt3-175b"),
    "Llama-3-70B": _llama,
}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hardware", nargs="+", default=["h100", "a100"], choices=profile_names())
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    print("| model | hardware | way | step, ms | exposed, forward + backward, ms | peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, make in _MODELS.items():
        for hardware in options.hardware:
            for way, asked in _WAYS.items():
                print(
                    f"| {name} | {hardware} | {way} | {_cells(make, hardware, options.tp, asked)} |"
                )


def _cells(make: Callable[[], nn.Module], hardware: str, tp: int, asked: dict[str, bool]) -> str:
    with torch.device("meta"):
        model = make().bfloat16()
        ids = torch.zeros(_TOKENS // _SEQUENCE, _SEQUENCE, dtype=torch.long)
    inputs = (), {"input_ids": ids, "labels": ids}
    plan = sp_compiler.plan(model, inputs, tp=tp, hardware=hardware, **asked)
    exposed_ms = (us / 1e3 for us in plan.schedule.exposed_us.values())
    peak_gib = plan.activation_peak_bytes / 2**30
    text = " + ".join(f"{ms:.2f}" for ms in exposed_ms)
    return f"{plan.schedule.step_us / 1e3:.1f} | {text} | {peak_gib:.2f} GiB"


if __name__ == "__main__":
    main()
