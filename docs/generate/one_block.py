"""``docs/one-block.md``: one block as text after every pass, and the code that comes out."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

from sp_compiler.base.provenance import layer_of
from sp_compiler.codegen.module_text import printed_regions
from sp_compiler.compiler import build
from sp_compiler.ir.snapshot import Snapshot, region_of
from sp_compiler.ir.text import render, render_node
from sp_compiler.options import CompileOptions

PAGE = Path(__file__).parents[1] / "one-block.md"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate = nn.Linear(16, 64, bias=False)
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Two blocks between a projection and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


_HEAD = """# One block after every pass

Written by `python -m docs.generate --write`; not edited by hand.

The second half of a Llama layer, a norm, a gated MLP and the residual, as a user writes it:

```python
{source}
```

Two of them in a model, compiled for two ranks with a batch of 4 x 6 tokens. What follows is the
first block after each pass, as `module.stages` holds it: a line per operator, with dtype and shape,
after `@` the placement ([glossary](glossary.md)) and after `#` what becomes of a result that
backward reads: it is saved, or recomputed. What backward does not read is neither.
A full Llama layer after every pass is in `tests/goldens/llama/`.
"""
_ABOUT = {
    "export": "PyTorch's own export: one flat graph of the full model, in which each operator "
    "knows its module. Here is what belongs to the first layer.",
    "normalize": "One spelling for each thing: views are reshapes, dims count from the end, and a "
    "bias is an addition of its own, here after the projection before the block.",
    "outline": "The layer is a region of its own, which both layers call. Parameters are inputs, "
    "and `hidden` is the carry from layer to layer.",
    "shard": "One rank's part. Each weight has half of its rows or columns; between the blocks "
    "each rank has half of the tokens, `S(0)`: the 4 x 6 tokens are one dim of 24 rows, 12 on each "
    "rank. `convert(x, from, to, 2)` changes a placement on 2 ranks. Two of them are left: an "
    "all-gather before the first product, a reduce-scatter after the last. Values without `@` are "
    "views and gradients; the check derives theirs.",
    "joint": "Forward and backward in one graph. The gradient of each conversion is another one: "
    "of the all-gather a reduce-scatter, of the reduce-scatter an all-gather.",
    "simplify": "Leftovers of differentiation go: views of views, copies, equal results.",
    "tag": "The policy reads the joint graph, and its tags are written back to the sharded block, "
    'which is shown. `recompute="selective"` saves the results of matrix products, of attention '
    "and of reductions over ranks, and recomputes the rest; of a gathered value only the shard is "
    "saved.",
    "partition": "Forward and backward apart. What forward returns after its outputs is what it "
    "saves; recomputed operators stand in backward before their first use.",
    "overlap": "A collective of backward is started, work that does not need its result runs, and "
    "its first reader waits for it, where that takes less time and raises no peak of memory. "
    "Forward is a chain and waits for each of its collectives.",
}


def page() -> str:
    """The text of the page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = build(Model(), (torch.randn(4, 6, 16),), {}, CompileOptions(tp=2))
    parts = [_HEAD.format(source=inspect.getsource(Block).rstrip())]
    for name, stage in compiled.stages.items():
        about = textwrap.fill(_ABOUT.get(name, ""), 100)
        text = block_text(stage, Block.__name__, "layers.0")
        parts.append(f"## {name}\n\n{about}\n\n```\n{text}\n```\n")
    code = printed_regions(compiled)[Block.__name__].source.strip()
    about = textwrap.fill(
        "The code that runs, and that `module.code` shows: a class for the block, plain PyTorch. "
        "`norm_weight` is stored as `I` and read as `R`: its gradient here is this rank's part of "
        "a sum, which the runtime all-reduces together with those of all such parameters.",
        100,
    )
    parts.append(f"## The generated code\n\n{about}\n\n```python\n{code}\n```")
    return "\n".join(parts) + "\n"


def block_text(stage: Snapshot, region: str, first_layer: str) -> str:
    """The graphs of a region; before there are regions, the nodes of its first layer."""
    graphs = {name: graph for name, graph in stage.graphs.items() if region_of(name) == region}
    if graphs:
        return "\n\n".join(f"{name}:\n{render(graph)}" for name, graph in graphs.items())
    (graph,) = stage.graphs.values()
    return f"{first_layer}:\n{_layer_text(graph, first_layer)}"


def _layer_text(graph: Graph, path: str) -> str:
    """Like :func:`render`; values from outside the layer, its parameters too, keep their names."""
    layer = [node for node in graph.nodes if layer_of(node).path == path]
    numbers = {node: f"%{number}" for number, node in enumerate(layer)}
    return "\n".join(
        render_node(node, lambda value: numbers.get(value, f"%{value.name}")) for node in layer
    )
