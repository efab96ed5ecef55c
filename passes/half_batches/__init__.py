"""Run layers on two half batches, so that collectives of one overlap with kernels of the other.

::

    y = linear(x, w)                     y_0 = linear(x_0, w)
    z = gelu(y)                    ->    y_1 = linear(x_1, w)
                                         z_0 = gelu(y_0)
                                         z_1 = gelu(y_1)

A layer is one chain: nothing in its forward can run during a collective. Two halves are two chains,
which the overlap pass interleaves (Wang et al. 2024, "Domino", arXiv 2409.15241, section 3.2). Both
read the same parameters, and differentiation sums their gradients.

To an operator, a half is like one of two ranks when its batch is sharded: the operator's rule says
whether it can run on each half separately, and with which size arguments. Results are therefore
those of the full batch, except for the order of sums in gradients of parameters. This happens
before sharding, so every rank holds a part of the tokens of each half.

The layers are split, and cheap operators around them. Embeddings are looked up for the full batch,
and the halves are joined before a wide matmul, the head. Experts that sort the rows of the batch
sort those of each half (:mod:`.sorted_rows`). Requires and preserves normal form.
"""

from __future__ import annotations

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import source_line
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import is_getitem
from sp_compiler.ir.rewriting import erase_dead
from sp_compiler.passes.half_batches.choice import RefusedError, calls_to_split
from sp_compiler.passes.half_batches.rewrite import Halves
from sp_compiler.planning.plan import Plan

# Kernels on half the rows are a little less efficient than estimated; the gain must exceed that.
_LEAST_GAIN = 0.01


def half_batches(captured: Captured) -> None:
    """Split the layers of ``captured`` in place, or decline with a reason and do not change it.

    The batch is dim 0 of the inputs with two or more dims. Operators in layers that mix it (batch
    norm, experts that choose tokens, statistics over the batch) cannot be split, nor can a batch
    of an odd size.
    """
    graph = captured.module.graph
    try:
        splits = calls_to_split(captured)
    except RefusedError as refused:
        report_of(Pass.HALF_BATCHES).decline(refused.node, refused.reason)
        at = source_line(refused.node)
        captured.notes.append(f"half batches: {refused.reason}" + (f" ({at})" if at else ""))
        return
    halves = Halves(graph)
    for node in list(graph.nodes):
        if node in splits:
            halves.split(node, splits[node])
        elif not (is_getitem(node) and node.args[0] in splits):
            halves.join_operands(node)
    erase_dead(graph)
    graph.lint()


def halves_pay(halves: Plan, full: Plan, budget_bytes: int | None) -> bool:
    """Return whether a step on half batches takes less time than on the full one, and no more
    memory than that or than ``budget_bytes``."""
    faster = halves.schedule.step_us < (1 - _LEAST_GAIN) * full.schedule.step_us
    most_bytes = max(full.activation_peak_bytes, budget_bytes or 0)
    return faster and halves.activation_peak_bytes <= most_bytes
