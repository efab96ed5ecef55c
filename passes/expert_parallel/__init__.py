"""Divide the experts of every layer over the ranks of the axis "ep".

::

    y = grouped_mm(x, w, ends)         # x (s, k): rows by expert, w (e, k, n)
    -->
    splits, order, places, experts, own_ends = expert_routes(ends, s, n_ep)
    x_1 = expert_dispatch(x, splits, order, places)      # (s * n_ep, k): the rows of w's experts
    y_1 = grouped_mm(x_1, w, own_ends)                   # w (e / n_ep, k, n): this rank's experts
    y = expert_combine(y_1, splits, order, places)       # (s, n)

The parameters with a matrix (or a vector) per expert are recognised by their use: as the factors of
grouped matmuls, or picked by the expert of each row (``w[ids]``). The operators between the first
and the last such use compute row by row, which the sharding rules prove, and run on the rows that
were sent here; nothing else changes. The router's weights multiply the rows that come back, so the
router's gradient is that of its own rows.

The graph describes only this rank's own rows. As many rows as all ranks have may be sent here, so a
layer computes on ``s * n_ep`` rows; the unused last ones are zeros. Their results are dropped, and
their gradients are zeros. Requires and preserves normal form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import descendants, is_call, reach, shape_of
from sp_compiler.ir.op_traits import MATMULS, is_copy, is_view
from sp_compiler.ir.rewriting import fake_mode_of, refake
from sp_compiler.passes.expert_parallel.layers import HOW, Layer, layers_of
from sp_compiler.passes.expert_parallel.rewrite import Rewrite

__all__ = ["expert_parallel"]

aten = torch.ops.aten
_PRODUCTS = {aten.matmul.default, *MATMULS} - {aten.convolution.default}


def expert_parallel(
    captured: Captured, num_ranks: int, divisible: Collection[str] | None = None
) -> None:
    """Divide the experts of ``captured`` over ``num_ranks`` ranks, in place.

    Parameters of experts get the shape of one rank's part, and are listed in
    ``captured.experts``. Those not among ``divisible`` stay whole on every rank, as do the rows
    that they multiply; ``None`` divides all.

    Raises:
        UnsupportedError: no experts, or experts in a form that cannot be divided.
        ArgumentError: a number of experts that is not divisible by the number of ranks.
    """
    graph, mutated = captured.module.graph, {*captured.mutated}
    sources = [*zip(captured.placeholders, captured.refs, strict=True)]
    names = {node: ref.name for node, ref in sources if ref.kind == "param"}
    layers = layers_of(graph, names)
    if not layers:
        raise UnsupportedError(_none_found(captured, names))
    if divisible is not None:
        layers = [x for x in layers if any(names[use.weight] in divisible for use in x.uses)]
    weights = dict.fromkeys(use.weight for layer in layers for use in layer.uses)
    for weight in weights:
        _divide(weight, names[weight], layers, num_ranks)
    # The seed differs too, but a row's random numbers may come from the rank that computes it.
    own = [node for node, ref in sources if ref.kind in ("input", "seed") or ref.name in mutated]
    varying = descendants(own) - {node for node, ref in sources if ref.kind == "seed"}
    for layer in layers:
        Rewrite(layer, num_ranks, varying).run()
    captured.experts = tuple(names[weight] for weight in weights)
    if divisible is not None:
        read = {name for node, name in names.items() if node.users}
        _require_divided_as_before(read & {*divisible}, {*captured.experts})
    graph.lint()


def _require_divided_as_before(stored: Collection[str], divided: Collection[str]) -> None:
    """Raise an error unless the ``divided`` parameters are those that are ``stored`` as divided."""
    for name in sorted({*stored} ^ {*divided}):
        before, now = ("divided", "whole") if name in stored else ("whole", "divided")
        raise UnsupportedError(
            f'parameter {name!r} is {before} over the ranks of "ep" since the first call, and this '
            f"call needs it {now}: let the first call, or example_inputs, reach all experts of the "
            "same layer, and let nothing else read them"
        )


def _none_found(captured: Captured, names: dict[Node, str]) -> str:
    stacked = [
        name for node, name in names.items() if len(shape_of(node)) == 3 and _multiplies(node)
    ]
    named = [name for name in captured.parameters if "expert" in name]
    where = next(iter([*stacked, *named]), None)
    found = "the model has no experts: leave the axis out"
    if where is not None:
        path = where.rpartition(".")[0]
        of = f"module {path!r}" if path else f"parameter {where!r}"
        found = f"the experts of {of} have an unsupported form"
    users = (user for node, name in names.items() if name == where for user in node.users)
    # The line of the model that would have to change.
    origin = next((f"\n{node_origin(user)}" for user in users), "")
    return f'the mesh has an axis "ep", which divides experts, and {found}. {HOW}{origin}'


def _multiplies(weight: Node) -> bool:
    """Return whether ``weight``, or a part of it, is a factor of a matmul."""
    # Filters of a convolution have three dims too, as do position embeddings, which are added.
    passes_on = (aten.index.Tensor, aten.index_select.default)
    read = reach(
        [weight],
        lambda node: (
            node.users
            if node is weight or is_view(node) or is_copy(node) or is_call(node, *passes_on)
            else ()
        ),
    )
    return any(is_call(node, *_PRODUCTS) for node in read)


def _divide(weight: Node, name: str, layers: Sequence[Layer], num_ranks: int) -> None:
    """Give ``weight`` the shape of one rank's part."""
    uses = [use for layer in layers for use in layer.uses if use.weight is weight]
    views = dict.fromkeys(view for use in uses for view in use.views)
    known = {*views, *(use.node for use in uses)}
    for user in (user for node in (weight, *views) for user in node.users):
        if user not in known:
            raise UnsupportedError(
                f"the experts of parameter {name!r} cannot be divided over {num_ranks} ranks: "
                f"{user.name} reads all of them. {HOW}\n{node_origin(user)}"
            )
    shape = shape_of(weight)
    if shape[0] % num_ranks:
        raise ArgumentError(
            f"mesh: {shape[0]} experts of parameter {name!r} are not divisible by the {num_ranks} "
            'ranks of the axis "ep": choose a size of this axis that divides them'
        )
    with fake_mode_of(weight.graph):
        weight.meta["val"] = weight.meta["val"].new_empty((shape[0] // num_ranks, *shape[1:]))
    for view in views:
        refake(view)
