"""Formulas of the activations that a layer saves, derived by the compiler from its graphs.

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

_INTRODUCTION = f"""# Activation memory

Written by `python -m benchmarks.memory_formulas --write`; not edited by hand.

The tensors that a layer saves for backward, as formulas. They help to choose a `recompute=`
setting, and to check a plan by hand.

```python
plan = sp_compiler.plan(model, example_inputs, tp=8)
print(plan.activation_formula)
```

`plan.activation_formula` has the bytes saved between forward and backward on one rank, as `sympy`
expressions: for each distinct block (`blocks`), each tensor (`tensors`) and the model
(`total`). They are derived from the graph: two sizes share a symbol only if an operator requires
them to be equal, and the name of a symbol follows from what operators do with the dim, never from
names in the model. At the sizes of the plan, the formulas give exactly the planned bytes.

| symbol | meaning |
|---|---|
| b, s | batch, sequence |
| h | hidden size: width of the value that each layer passes to the next |
| a, k | attention heads, key/value heads |
| d | size of a head; written as h/a if they are equal |
| f | feed-forward width; written as a multiple of h if it is one |
| e, c | experts, experts chosen per token |
| v | vocabulary |
| t | tensor-parallel ranks |
| L | layers |
| n, n2, ... | a size without a known role; `plan.activation_formula.symbols` has its value |

Sizes that happen to be 1 in the example (one sequence in a batch, one head per rank) are tracked
too, as factors of the dim that they would belong to in a larger example. If the graph for a batch
of one does not distinguish the batch from a dim that is always 1, `plan` derives the formulas at a
larger batch, and uses them if at a batch of one they give the bytes of this plan. That compiles the
model again when the formulas are first read; a plan of a compiled module never does this.
`tells_batch` says whether the batch is known. `activation_formula.value(formula, b=4, s=4096)`
gives the bytes at other sizes. It raises an error if the formula does not determine them: if a
batch of one is indistinguishable from other sizes of 1, or the model saves other tensors for more
than one sequence; if a size without a role is missing; if a width that is expressed through others
is given another value; or if a size that was divisible by t in the plan no longer is.

If b·s is not a multiple of t, tokens are padded and the formula has `ceiling(b*s/t)`. A padded
width or vocabulary has `ceiling(f/t)` or `ceiling(v/t)`.

The tables show one layer of each model in bfloat16 on {TP} ranks with b = {BATCH}, s = {LENGTH},
dropout as in the published configuration, and its masks regenerated in backward. The second column
omits terms without a width (row statistics, seeds), like published formulas and
`activation_formula.widths_only`; the dropout seed of a layer is 8 bytes.
"""

_LOSS_HEAD = """
## The loss head in chunks

Besides the layers, a step holds the logits: v/t values per token, in float32 if the model casts
them. They exist in forward, next to their exponentials, and again in backward as their gradient. If
a model returns only its loss, sp_compiler never has all logits at once. Forward computes them for
one chunk of rows, turns them into losses and frees them. Backward recomputes the chunk, turns it
into its gradient and adds that to the gradients of the weight and of the hidden states. The
logsumexp of each row is saved, so no collective runs twice. Logits may be cast, scaled, softcapped
and penalized (z-loss); losses may be smoothed, weighted and shifted, and rows that a shift drops
are not computed at all. HuggingFace models return logits in addition to the loss; this wrapper does
not:

```python
class LossOnly(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        return self.model(input_ids=input_ids, labels=labels).loss
```

`loss_chunks="auto"`, the default, uses chunks if they lower the peak of a step by at least 5 %. It
tries 2, 4, 8 and 16 chunks, of at least 1,024 rows each, and takes the smallest number whose peak
is within 1 % of the lowest. Numbers that lengthen the step by a larger share than they lower its
peak are excluded. Under a memory budget it uses as many chunks as the budget needs.
`recompute="none"` saves the logits instead. Chunks cost one more matmul with the vocabulary weight.
Activations at the peak, for Llama-3-8B on 8 ranks, 8,192 tokens, bf16, H100 (`python -m
benchmarks.chunked_head`):

| recompute | 1 chunk, planned | measured | "auto", planned | measured | compute |
|---|---|---|---|---|---|
| selective | 4.11 GiB | 4.11 GiB | 3.34 GiB (-19 %) | 3.34 GiB (-19 %) | +1.5 % |
| full | 1.48 GiB | 1.49 GiB | 876 MiB (-42 %) | 876 MiB (-42 %) | +1.2 % |

The measured values count the storages that one rank's generated code holds at these sizes, on
tensors without memory: they are within 1 % of the plan. If with chunks the peak is in the blocks,
it includes the memory that [overlap](overlap.md#memory) uses there to hide communication.

Logits are not chunked if they are returned, if an operator that mixes rows reads them (a softmax
over tokens), or if their rows are sharded over the ranks; the plan gives the reason under the pass
`chunk`. On one device, and if the vocabulary is not sharded, backward also recomputes the
log-probabilities of a chunk. A loss may be written out as `log_softmax(x).gather(-1, y)`, with one
label per row. A program with a chunked head has fixed sizes: each input size is compiled
separately, and a warning says so. Sizes stay dynamic if nothing is chunked: below 2,048 rows, where
chunks save too little, with `recompute="none"`, and with `loss_chunks=1`.

The weight gradients of the chunks are added in the dtype of their matmuls, under autocast too,
like those of microbatches. In float64 nothing is lost; in bfloat16 each sum is rounded. For
512 rows, the error of the head's gradient (2-norm, against float64) was 0.28 % in 1 chunk, 0.34 %
in 4 and 0.53 % in 16 under autocast, and 0.60, 0.64 and 0.76 % with bfloat16 parameters.
`loss_chunks=1` rounds once.

## Attention with dropout

Attention without dropout runs fused. With dropout, a fused kernel would draw its masks from torch's
generator, so scores, probabilities and masks are materialized: several tensors with one value per
head and pair of a query and a key, which every policy except "none" recomputes, and which dominate
the peak for long sequences. They run in chunks of queries. A chunk sees all keys, so its softmax is
complete, and its masks are those of its positions in the full scores: outputs and gradients are
those of a single chunk, up to the order of the sums over queries in the gradients of keys and
values. Queries, keys, values and the context are saved, as before; backward recomputes the
probabilities of one chunk, uses them and frees them. Masks of any kind, grouped heads, padded heads
and added biases are supported.

`attention_chunks="auto"`, the default, chooses the number by the same rule, with chunks of at least
256 queries. No matmul is added, except with `recompute="full"`, which computes the scores twice in
backward (once for the context, once for the gradients). For 2 samples, 8 heads of 32 and 1,024
tokens in float64, one set of scores is 128 MiB; on a CPU with "selective", measured and planned:

| chunks | peak of a step | in sets of scores |
|---|---|---|
| 1 | 419.1 MiB | 3.3 |
| 2 | 235.1 MiB | 1.8 |
| 4 ("auto") | 145.0 MiB | 1.1 |

Not chunked are attention that returns its probabilities, or whose queries are sharded over the
ranks (the plan has the reason), fewer than 512 queries, `recompute="none"` unless chunks are
requested, and decomposed attention without dropout. The mask itself remains, one byte per pair of a
query and a key, without a head dim. As with a chunked head, sizes are fixed.

On a GPU none of these tensors exists. There attention with dropout, and decomposed attention with
or without dropout, becomes one operator (`passes/fuse_attention.py`), which FlexAttention computes
block by block with the same masks. Dropout of probabilities takes two calls in forward, of which
the second multiplies 16 columns of values, and one in backward ([the
derivation](../sp_compiler/ops/gpu/attention.py)). Queries, keys, values, the context and one value
per query are saved; nothing is recomputed, so "selective" repeats no matmul of attention. Blocks of
128 x 128 that a boolean mask forbids are skipped, but for queries that see no key. A kernel is
compiled for each shape, at the first call. These cases run as on a CPU, with the reason in the
plan: float64, heads with less than 16 or more than 256 columns, fewer than 128 queries or keys,
dynamic sizes, a bias (ALiBi, T5's, and additive masks: with these, a query that sees no key gets
the mean of all values), masks that replace scores by finite values, and probabilities that other
operators read. A plan that is made on the CPU describes the CPU. On an H100 and an H200 the kernels
agree with float64 within 2e-6 of the largest value, in float32 (`tests/test_cuda.py`). Forward and
backward together take [a thirteenth of the time](gpu.md#attention) of the decomposed operators, or
less. With dropout they take 1.3 to 1.7 times the time of PyTorch's FlashAttention, whose masks
depend on the number of ranks.
"""

_MINIMUM = """
## The minimum that "selective" saves

"selective" repeats no matmul except those of the attention core. It therefore has to save
the sums on the residual stream, from which norms are recomputed, and the result of every linear
layer that backward reads. Elementwise and row-wise functions of these are recomputed: norm outputs,
casts, rotary embeddings of queries and keys, GELU and SiLU, the product of gate and up, dropout
masks, residual sums of saved values.

- **GPT**: x, q, k, v, the context, the output of the attention's projection, the output of the
  first linear layer of the MLP: 2 (1 + 3 + 1 + 1 + 4) = 20 sbh/t bytes. **BERT** has its norms
  after the sums, so backward of the last norm also reads the output of the MLP's second linear
  layer: 22 sbh/t.
- **SwiGLU** saves gate and up instead of their product, 4 f bytes per token instead of 2 f: the
  backward of the product needs both factors, and recomputing either would repeat its matmul.
- **Grouped-query attention**: keys and values are saved before they are repeated, 4 kd bytes per
  token instead of 4 ad.
- **Mixture of experts**: gate and up of the chosen experts, for c copies of each token; the
  router's logits, from which the choice of experts is recomputed; and the experts' outputs, c per
  token, for the gradient of the routing weights.
- **Fused attention** also saves the logsumexp of each row: one value per head and token.

The saved tensors, one by one:
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
    yield "| recompute | bytes per layer | with all terms |\n|---|---|---|"
    for policy in POLICIES:
        found = planned(build, recompute=policy)
        formula = found.activation_formula
        exact = formula.blocks[layer(found).name]
        yield f"| {policy} | `{tidy(formula.widths_only(exact))}` | `{tidy(exact)}` |"


def _tensors(build: Callable[[], nn.Module]) -> Iterator[str]:
    found = planned(build, recompute="selective")
    block = layer(found)
    yield "| tensor | module | operator | bytes | saved because |\n|---|---|---|---|---|"
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
