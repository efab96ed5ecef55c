"""Numbers of chunks that loss heads and attention may be cut into, and sizes needed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ir.fx import ancestors, is_call, shape_of
from sp_compiler.ir.op_traits import base
from sp_compiler.ir.symbolic import is_open
from sp_compiler.ops.registry import operator_of
from sp_compiler.ops.vocabulary import VOCAB_NLL
from sp_compiler.ops.vocabulary_losses import VOCAB_LOGSUMEXP, VOCAB_SMOOTHED_NLL
from sp_compiler.passes.chunks.chains import Kind, chains, widens
from sp_compiler.passes.chunks.flatten import flatten_rows
from sp_compiler.passes.chunks.row_losses import losses_by_row
from sp_compiler.passes.chunks.row_rules import DROPOUTS
from sp_compiler.trace.joint import JointGraph

aten = torch.ops.aten

_LOSSES = (VOCAB_NLL, VOCAB_SMOOTHED_NLL, VOCAB_LOGSUMEXP)
_UNSHARDED_LOSSES = (aten.nll_loss_forward.default, aten._log_softmax.default)

MOST_CHUNKS = 16
"""More would make the generated text long, and by then the logits of a chunk are small compared
with other values."""
LEAST_ROWS = 1024
"""Minimum rows per chunk, if the number of chunks is chosen automatically: a matmul of fewer rows
does not reach full speed."""
LEAST_QUERIES = 256
"""The same for attention, whose matmuls have this many rows for every sample and head."""


class OpenRowsError(UnsupportedError):
    """The number of rows of a value that may have to be chunked is open."""


def counts_of_losses(
    joint: JointGraph, counts: Sequence[int] | None
) -> tuple[Sequence[int], JointGraph]:
    """Return numbers of chunks of the loss heads of ``joint``, and the graph that can be cut."""
    if counts == (1,):
        return (1,), joint
    if _has_open_rows(joint, counts):
        raise OpenRowsError(
            "a loss head in chunks needs a fixed number of rows; loss_chunks=1 leaves it open"
        )
    num_rows = [shape_of(product)[0] for product in _products(joint, "loss")]
    # Checked first: most blocks are not long enough, and the search for chains takes a copy.
    least_rows = 2 * LEAST_ROWS if counts is None else 1
    if any(map(is_open, num_rows)) or max(num_rows, default=0) < least_rows:
        return (1,), joint
    # A copy, because the joint graph as it is remains the alternative without chunks.
    rows = joint.copy()
    flatten_rows(rows.graph, _products(rows, "loss"))
    losses_by_row(rows.graph)
    return _allowed(rows, "loss", counts, LEAST_ROWS), rows


def counts_of_attention(joint: JointGraph, counts: Sequence[int] | None) -> Sequence[int]:
    """Return numbers of chunks of the attention with dropout in ``joint``."""
    drawn = [node for node in joint.graph.nodes if is_call(node, *DROPOUTS)]
    if counts == (1,) or not drawn:
        return (1,)
    # As text: comparing open sizes would record the result.
    dropped = {str(shape_of(node)[-2:]) for node in drawn}
    products = _products(joint, "attention")
    num_rows = [n for n, keys in (shape_of(p)[1:] for p in products) if str((n, keys)) in dropped]
    least_rows = 2 * LEAST_QUERIES if counts is None else 1
    # The comparison is recorded: a longer call gets a separate program, maybe in chunks.
    if not any(n >= least_rows for n in num_rows):
        return (1,)
    if any(map(is_open, num_rows)):
        raise OpenRowsError(
            "attention with dropout in chunks needs a fixed number of queries; "
            "attention_chunks=1 leaves it open"
        )
    return _allowed(joint, "attention", counts, LEAST_QUERIES)


def _allowed(
    joint: JointGraph, kind: Kind, counts: Sequence[int] | None, least_rows: int
) -> Sequence[int]:
    """Return the numbers of ``counts`` that the longest chain of ``joint`` has rows for; for
    ``None`` powers of two that leave ``least_rows`` per chunk."""
    longest = max((chain.num_rows for chain in chains(joint, kind)), default=0)
    if not longest:
        return (1,)
    if counts is not None:
        return [min(count, longest) for count in counts]
    most = min(MOST_CHUNKS, longest // least_rows)
    return [2**power for power in range(max(1, most.bit_length()))]


def _products(joint: JointGraph, kind: Kind) -> list[Node]:
    """Return the matmuls of the forward whose rows are longer than their operands'."""
    backward = joint.backward_nodes()
    return [node for node in joint.graph.nodes if node not in backward and widens(node, kind)]


def _has_open_rows(joint: JointGraph, counts: Sequence[int] | None) -> bool:
    """Return whether the number of rows of a loss head that may be chunked is open."""
    returned = {base(node) for node in joint.outputs}
    for node in joint.graph.nodes:
        over_vocabulary = operator_of(node.target) in _LOSSES
        if not over_vocabulary and not is_call(node, *_UNSHARDED_LOSSES):
            continue
        logits = node.args[0]
        placement = logits.meta.get("placement")
        if placement is not None and placement.is_sharded and placement.dim == 0:
            continue  # rows that are sharded over ranks are not cut, and leave sizes open
        num_rows, classes = math.prod(shape_of(logits)[:-1]), shape_of(logits)[-1]
        # The comparison is recorded: a longer call gets a separate program, maybe in chunks.
        is_long = counts is not None or num_rows >= 2 * LEAST_ROWS
        # Returned logits stay whole, and leave sizes open.
        wide = [x for x in ancestors([logits]) & returned if shape_of(x)[-1:] == (classes,)]
        if is_open(num_rows) and is_long and not wide:
            return True
    return False
