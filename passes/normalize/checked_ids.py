"""Check ids on a GPU before lookups and losses, because the check in those kernels is a device-side
assert, after which the device cannot be used.

::

    x = embedding(table, ids)     ->    inside = checked_ids(ids, rows, ...)
                                        x = embedding(table, inside)

Ids that pick rows with ``x[ids]``, ``gather`` or ``index_select`` are not checked: they are mostly
computed (the experts of a token), once per layer, and a check would take time in each.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.fx import arguments, calls, shape_of
from sp_compiler.ir.rewriting import insert_call
from sp_compiler.ops.gpu.checked_ids import CHECKED_IDS

_aten = torch.ops.aten
DEVICES = ("cuda",)
"""Types of devices that cannot be used after their own check failed."""
_LOOKUPS = (_aten.embedding.default, _aten.embedding_bag.padding_idx)
# nll_loss only if its input is not log_softmax: otherwise it became a cross_entropy_loss.
_LOSSES = (_aten.cross_entropy_loss.default, _aten.nll_loss_nd.default)


def check_ids(graph: Graph) -> None:
    """Insert checks of ids in place, in a graph whose other operators are normalized."""
    for node in calls(graph, *_LOOKUPS):
        table, ids = node.args[:2]
        _check(node, ids, shape_of(table)[0], None, "an embedding of {} rows")
    for node in calls(graph, *_LOSSES):
        given = arguments(node)
        target = given["target"]
        if not target.meta["val"].is_floating_point():  # otherwise probabilities of all classes
            classes = shape_of(given["self"])[1 if len(shape_of(given["self"])) > 1 else 0]
            what = "a loss over {} classes, as target"
            _check(node, target, classes, given["ignore_index"], what)


def _check(node: Node, ids: Node, size: int, ignored: int | None, what: str) -> None:
    if ids.meta["val"].device.type not in DEVICES or ids.target is CHECKED_IDS.overload:
        return
    checked = insert_call(
        node, CHECKED_IDS.overload, (ids, size, ignored, what, 1), origin=Pass.NORMALIZE
    )
    node.replace_input_with(ids, checked)
