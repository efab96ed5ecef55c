"""Communication of a compiled GPT-2 that nothing hides, per recompute policy, without a cluster.

::

    python -m examples.exposed_communication --tp 8 --hardware a100
    python -m examples.exposed_communication --tp 8 --gb-per-s 20 --latency-us 10

One rank of an emulated group runs a step on the CPU; its operators and collectives take the time
that they would take on the device, on a virtual clock.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import sp_compiler

POLICIES = ("none", "attention", "selective", "full")


def measured(
    model: nn.Module,
    example_inputs: Any,
    tp: int,
    recompute: str,
    gb_per_s: float | None = None,
    latency_us: float | None = None,
    hardware: str = "h100",
) -> tuple[sp_compiler.VirtualClock, sp_compiler.Plan]:
    """The clock after one step of ``model``, whose output begins with its loss; and the plan."""
    args, kwargs = example_inputs
    with sp_compiler.emulated_group(tp, gb_per_s, latency_us, hardware=hardware) as clock:
        module = sp_compiler.compile(
            model,
            tp=tp,
            example_inputs=example_inputs,
            recompute=recompute,
            hardware=clock.hardware,
        )
        clock.reset()
        module(*args, **kwargs)[0].backward()
    return clock, module.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--gb-per-s", type=float)
    parser.add_argument("--latency-us", type=float)
    args = parser.parse_args()
    config = GPT2Config(
        vocab_size=1024, n_positions=args.length, n_embd=args.hidden, n_layer=args.layers, n_head=8,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(config.vocab_size, (1, args.length))
    table = Table("recompute", "step us", "phase", "communication us", "exposed us", "exposed %")
    for policy in POLICIES:
        inputs = ((), {"input_ids": ids, "labels": ids, "return_dict": False})
        link = args.gb_per_s, args.latency_us, args.hardware
        clock, _ = measured(GPT2LMHeadModel(config), inputs, args.tp, policy, *link)
        for phase, busy_us in clock.busy_us.items():
            exposed_us = clock.exposed_us[phase]
            numbers = f"{busy_us:.1f}", f"{exposed_us:.1f}", f"{100 * exposed_us / busy_us:.1f}"
            step = f"{clock.now_us():.1f}" if phase == "forward" else ""
            table.add_row(policy if step else "", step, phase, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
