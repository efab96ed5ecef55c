"""What a layer keeps for backward, as formulas that the compiler derives from its own graphs.

    python -m benchmarks.memory_formulas [--write]

Prints docs/memory.md, or writes it. Models are two layers deep, in bfloat16; nothing is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models import PAPER_SETUPS, PlainGPT
from sp_compiler.api import plan
from sp_compiler.planning.data import BlockPlan
from sp_compiler.planning.formula import tidy
from sp_compiler.planning.plan import Plan

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
TP, BATCH, LENGTH = 8, 2, 2048
POLICIES = ("none", "attention", "selective", "full")

_INTRODUCTION = f"""# Memory kept for backward

Written by `python -m benchmarks.memory_formulas --write`; not edited by hand.

`plan.activation_formula` is what a program keeps between forward and backward on one rank: bytes as
`sympy` expressions, of each distinct block (`blocks`), of every tensor (`tensors`) and of the whole
model (`total`). They are derived from the graph: two sizes get the same symbol only where an
operator makes them equal, and a symbol gets its name from what is done with the dim, never from a
name in the model. At the sizes of the plan they give the planned bytes exactly.

| symbol | what it is |
|---|---|
| b, s | batch, sequence |
| h | width of what one layer hands to the next |
| a, k | attention heads, heads of keys and values |
| d | width of a head; written as h/a where that is its size |
| f | feed-forward width; written as a multiple of h where it is one |
| e, c | experts, experts chosen for a token |
| v | vocabulary |
| t | tensor-parallel ranks |
| L | layers |
| n, n2, ... | a size without a role; `plan.activation_formula.symbols` has its value |

A size of 1 that could be larger (one sequence in a batch, as many heads as ranks) is followed too:
what each rank has one of stays in the dim that is sharded. Where a batch of one does not tell the
batch from a dim that is 1 in every batch, the formula has a size without a role for it.
`activation_formula.value(formula, b=4, s=4096)` gives the bytes at other sizes, or raises where the
formula does not tell: a size without a role that is not given, a width that is written as others
are and is given another value, sizes that t does not divide and that it did divide in the plan.

Where b·s is not a multiple of t,
tokens are padded and the formula has `ceiling(b*s/t)`; where a width or a vocabulary is padded it
has `ceiling(f/t)` or `ceiling(v/t)`.

Below: a layer of each model in bfloat16 on {TP} ranks with b = {BATCH}, s = {LENGTH}, dropout as in
the published configuration, masks drawn again. `widths_only` leaves out what has no width in it
(row statistics, seeds), as published formulas do; the seed of a layer's dropout is 8 bytes.
"""

_LOSS_HEAD = """
## The loss head in chunks

Beside the layers stand the logits: v/t a token, in float32 where a model casts them, made in
forward, with exponentials beside them, and again as their gradient. Where a model returns no
logits they never exist together: a chunk of rows at a time is multiplied, turned into losses and
dropped, and in backward recomputed, turned into its gradient, and added to the gradients of the
weight and of the hidden states. Kept is the logsumexp of each row, so no collective runs twice.
Logits may be cast, scaled, softcapped and penalized (z-loss), losses smoothed, weighed and
shifted; rows that a shift leaves out are cut off before the product. Models of transformers
return logits beside the loss; a wrapper does not:

```python
class LossOnly(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels).loss
```

`loss_chunks="auto"`, the default, takes as many chunks as lower the peak of a step (1, 2, 4, 8 or
16, of at least 1,024 rows), if that saves at least 5 % of it, and under a memory budget as many
as the budget asks for; `recompute="none"` keeps the logits. It costs the product of the
vocabulary once more. Planned for Llama-3-8B, 8 ranks, 8,192 tokens, bf16, H100, activations at
the peak:

| recompute | 1 chunk | "auto" | compute |
|---|---|---|---|
| selective | 4,213 MiB | 3,529 (-16 %) | +1.5 % |
| full | 1,521 MiB | 837 (-45 %) | +1.2 % |

Logits that are returned, or read by what mixes rows (a softmax over tokens), stay as they are,
and the plan says so under the pass `chunk`. So do those of one rank (`tp=1`) and of a vocabulary
that is not sharded. A program with a head in chunks has fixed sizes: each size of the inputs is
compiled by itself, which a warning says; `loss_chunks=1` leaves them open.
"""

_MINIMUM = """
## The least that "selective" keeps

A matrix product is never run again but for the attention core, so what has to be kept is: the sums
over the residual stream (norms are computed again from them), and the result of every linear that
backward reads. What is elementwise or row-wise in these is computed again where it is used: norm
outputs, casts, rotary embeddings of queries and keys, GELU and SiLU, the product of gate and up,
dropout masks, residual sums of kept values.

- **GPT**: x, q, k, v, context, what the attention's projection gave, the first linear of the MLP:
  2 (1 + 3 + 1 + 1 + 4) = 20 sbh/t. **BERT** has its norms after the sums, so that backward of the
  last one reads what the MLP's second linear gave too: 22 sbh/t.
- **SwiGLU** keeps gate and up, not their product: 4 f a token instead of 2 f, for backward of a
  product needs both factors, and either would take its matrix product to get back.
- **Grouped queries**: keys and values are kept before they are repeated: 4 kd a token, not 4 ad.
- **Mixture of experts**: gate and up of the chosen experts, c tokens for one; the router's logits,
  from which the choice of experts is computed again; and what the experts gave, c tokens for one,
  for the gradient of the weights that the router gives them.
- **Fused attention** also keeps the logsumexp of each row: a number a head and token.

What the compiler keeps, tensor by tensor:
"""


def _gpt() -> nn.Module:
    return PlainGPT(replace(PAPER_SETUPS["gpt-22b"].model, num_layers=2))


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=2,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
            num_key_value_heads=8, num_hidden_layers=2, vocab_size=128256, use_cache=False,
        )
    )  # fmt: skip


def _mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_hidden_layers=2, use_cache=False)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT (22B of Korthikanti et al.)": _gpt,
    "Llama (70B)": _llama,
    "Mixtral (8x7B)": _mixtral,
    "BERT (large)": _bert,
}


@cache
def planned(build: Callable[[], nn.Module], **options: Any) -> Plan:
    """The plan of a model, without its numbers."""
    with torch.device("meta"):
        model = build().bfloat16().train()
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return plan(model, ((), {"input_ids": ids, "labels": ids}), tp=TP, **options)


def layer(found: Plan) -> BlockPlan:
    """The block that is called most often."""
    return max(found.blocks, key=lambda block: block.num_calls)


def _rows(build: Callable[[], nn.Module]) -> Iterator[str]:
    yield "| recompute | bytes of a layer | with every term |\n|---|---|---|"
    for policy in POLICIES:
        found = planned(build, recompute=policy)
        formula = found.activation_formula
        exact = formula.blocks[layer(found).name]
        yield f"| {policy} | `{tidy(formula.widths_only(exact))}` | `{tidy(exact)}` |"


def _tensors(build: Callable[[], nn.Module]) -> Iterator[str]:
    found = planned(build, recompute="selective")
    block = layer(found)
    yield "| tensor | module | operator | bytes | kept because |\n|---|---|---|---|---|"
    for tensor, text in zip(block.kept, found.activation_formula.tensors[block.name], strict=True):
        module = tensor.module.removeprefix(block.paths[0]).removeprefix(".")
        note = f", {tensor.shared}" if tensor.shared else ""
        yield f"| {tensor.name} | {module} | {tensor.op} | `{text}` | {tensor.reason}{note} |"


def page() -> Iterator[str]:
    """Lines of docs/memory.md."""
    yield _INTRODUCTION
    for name, build in MODELS.items():
        yield f"## {name}\n"
        yield from _rows(build)
        yield ""
    yield _LOSS_HEAD.lstrip("\n")
    yield _MINIMUM.lstrip("\n")
    for name, build in MODELS.items():
        yield f"### {name}\n"
        yield from _tensors(build)
        yield ""


def main() -> None:
    """Print the page or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = "\n".join(page()).rstrip() + "\n"
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
