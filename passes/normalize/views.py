"""Fewer permutations: shortest chains of views, and one order of tokens within a layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.provenance import layer_of
from sp_compiler.ir.fx import arguments, calls, is_call, is_getitem, shape_of
from sp_compiler.ir.reshapes import common_factors
from sp_compiler.ir.rewriting import insert_call, replace_with
from sp_compiler.ir.symbolic import same_shape

# An operator and its arguments after the first.
ViewStep = tuple[Callable[..., Any], tuple[Any, ...]]

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_VIEWS = (_aten.reshape.default, _aten.transpose.int, _aten.permute.default)
_PRODUCTS = (_aten.linear.default, _aten.matmul.default)


def keep_token_order(graph: Graph) -> None:
    """Move transposes of tokens out of the way of token-wise operators, in place.

    ``linear(transpose(x, -2, -3), w)`` -> ``transpose(linear(x, w), -2, -3)``, likewise a sum with
    a bias and a split of the last dim; then upwards ``transpose(linear(x, w), -2, -3)`` ->
    ``linear(transpose(x, -2, -3), w)`` where ``x`` is itself a view, so that the transposes meet
    those of the attention core and cancel.

    ``nn.MultiheadAttention`` computes on (s, b, h), between two transposes: within a layer all
    tokens should be in the order of the residual stream, whose rows are sharded.
    """
    for node in calls(graph, *_PRODUCTS, _aten.add.Tensor, _aten.split_with_sizes.default):
        if _is_token_wise(node) and _swaps_tokens(node.args[0]) and _same_layer(node, node.args[0]):
            _sink_transpose(node)
    for node in reversed(list(calls(graph, _aten.transpose.int))):
        _raise_transpose(node)


def _swaps_tokens(node: object) -> bool:
    """Return whether the node is ``transpose(x, -2, -3)`` of (b, s, h)."""
    if not isinstance(node, Node) or not is_call(node, _aten.transpose.int):
        return False
    return len(shape_of(node)) == 3 and sorted(node.args[1:]) == [-3, -2]


def _is_token_wise(node: Node) -> bool:
    """Return whether row i of the result depends only on row i of the first argument."""
    if is_call(node, _aten.split_with_sizes.default):
        return arguments(node)["dim"] == -1
    other = node.args[1]
    rank = len(shape_of(other)) if isinstance(other, Node) else 0
    if is_call(node, _aten.add.Tensor):  # with a bias or a scalar
        return rank <= 1 and len(shape_of(node)) == 3
    return rank == 2 and len(shape_of(node)) == 3  # a plain weight


def _sink_transpose(node: Node) -> None:
    swap = node.args[0]
    assert isinstance(swap, Node)
    args = (swap.args[0], *node.args[1:])
    moved = insert_call(node, node.target, args, dict(node.kwargs), origin=_ORIGIN)
    if not is_call(node, _aten.split_with_sizes.default):
        back = insert_call(node, _aten.transpose.int, (moved, -2, -3), origin=_ORIGIN)
        replace_with(node, back)
        return
    # A split returns a list: each of its parts is transposed back.
    for part in [user for user in node.users if is_getitem(user)]:
        index = part.args[1]
        value = insert_call(part, part.target, (moved, index), origin=_ORIGIN)
        back = insert_call(part, _aten.transpose.int, (value, -2, -3), origin=_ORIGIN)
        replace_with(part, back)
    node.graph.erase_node(node)


def _raise_transpose(node: Node) -> None:
    chain: list[Node] = []
    source = node.args[0]
    # One user each, because the chain is recomputed on the other order of tokens.
    while (
        is_call(source, *_PRODUCTS, _aten.add.Tensor)
        and len(source.users) == 1
        and _is_token_wise(source)
        and _same_layer(node, source)
    ):
        chain.append(source)
        source = source.args[0]
    if not chain or not _swaps_tokens(node) or not is_call(source, *_VIEWS):
        return
    value = insert_call(node, _aten.transpose.int, (source, -2, -3), origin=_ORIGIN)
    for step in reversed(chain):
        args = (value, *step.args[1:])
        value = insert_call(node, step.target, args, dict(step.kwargs), origin=_ORIGIN)
    replace_with(node, value)
    for step in chain:
        node.graph.erase_node(step)


def shorten_view_chains(graph: Graph) -> None:
    """Consecutive views -> at most ``reshape``, ``transpose`` or ``permute``, ``reshape``.

    Steps that do nothing are dropped; a chain that would not get shorter does not change. Chains do
    not cross layers, and their inner values have no other users.
    """
    # From the end of each chain, so that it is taken in full and not from its middle.
    for node in reversed(list(calls(graph, *_VIEWS))):
        if not node.users or _continues(node):
            continue
        chain = [node]
        while is_call(chain[-1].args[0], *_VIEWS) and _continues(chain[-1].args[0]):
            chain.append(chain[-1].args[0])
        steps = _shortest(chain[::-1])
        if steps is None:
            report_of(Pass.NORMALIZE).decline(node, "it is not known how the dims correspond")
        # Nor if the length stays the same: a second run must change nothing.
        if steps is None or len(steps) >= len(chain):
            continue
        value = chain[-1].args[0]
        for target, argument in steps:
            value = insert_call(node, target, (value, *argument), origin=_ORIGIN)
        node.replace_all_uses_with(value)
        for step in chain:
            graph.erase_node(step)


def _continues(node: Node) -> bool:
    """Return whether the only user of a view is another view in the same layer."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    return is_call(user, *_VIEWS) and _same_layer(node, user)


def _same_layer(node: Node, other: object) -> bool:
    return isinstance(other, Node) and layer_of(node) == layer_of(other)


def _shortest(chain: list[Node]) -> list[ViewStep] | None:
    """Return at most three (operator, arguments) equal to ``chain``; ``None`` if unknown."""
    source, result = shape_of(chain[0].args[0]), shape_of(chain[-1])
    if 0 in source:  # an empty batch: sizes do not determine how the dims correspond
        return None
    factors = _Factors(source)
    for node in chain:
        if is_call(node, _aten.reshape.default):
            if not factors.reshape(shape_of(node)):
                return None
        elif is_call(node, _aten.transpose.int):
            first, second = node.args[1:]
            factors.swap(first, second)
        else:
            factors.permute(node.args[1])
    # Grouping neighbors that move together leaves fewer dims to move, but may take reshapes around
    # the permutation that it would not need otherwise. Both are tried.
    plans = (_steps(*factors.groups(coarse), source, result) for coarse in (False, True))
    return min(plans, key=len)


def _steps(
    sizes: list[int], order: list[int], source: tuple[int, ...], result: tuple[int, ...]
) -> list[ViewStep]:
    """Split the source into parts of ``sizes``, put them in ``order``, view them as ``result``."""
    steps: list[ViewStep] = []
    if order != sorted(order):
        if not same_shape(sizes, source):
            steps.append((_aten.reshape.default, (sizes,)))
        steps.append(move(order))
        sizes = [sizes[group] for group in order]
        source = tuple(sizes)
    if not same_shape(source, result):
        steps.append((_aten.reshape.default, (list(result),)))
    return steps


def move(order: list[int]) -> ViewStep:
    """Return a permutation as an operator: ``transpose`` if it swaps two dims."""
    # Counted from the end, as in all of a normalized graph.
    moved = [dim - len(order) for dim, origin in enumerate(order) if dim != origin]
    if len(moved) == 2:
        return _aten.transpose.int, tuple(moved)
    return _aten.permute.default, ([dim - len(order) for dim in order],)


class _Factors:
    """Dims of a view as products of factors of the dims of its source.

    ``sizes`` and ``order``: size of each factor, and the factors in the source's order;
    ``dims``: for each dim of the view its factors, outermost first.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.sizes = dict(enumerate(shape))
        self.order = [factor for factor, size in enumerate(shape) if size != 1]
        self.dims = [[factor] if size != 1 else [] for factor, size in enumerate(shape)]

    def swap(self, first: int, second: int) -> None:
        self.dims[first], self.dims[second] = self.dims[second], self.dims[first]

    def permute(self, dims: list[int]) -> None:
        self.dims = [self.dims[dim] for dim in dims]

    def reshape(self, shape: tuple[int, ...]) -> bool:
        """Regroup the factors, splitting them if needed; return False if that is impossible."""
        factors = [factor for dim in self.dims for factor in dim]
        common = common_factors([self.sizes[factor] for factor in factors], shape)
        if common is None:
            return False
        parts: dict[int, int] = {}  # position among the common factors to factor
        # A factor that is split keeps its number for its first part; new ones follow it.
        for factor, (first, *rest) in zip(factors, common.source, strict=True):
            parts[first], self.sizes[factor] = factor, common.sizes[first]
            place = self.order.index(factor)
            for position in rest:
                place += 1
                parts[position] = len(self.sizes)
                self.order.insert(place, len(self.sizes))
                self.sizes[len(self.sizes)] = common.sizes[position]
        self.dims = [[parts[position] for position in dim] for dim in common.target]
        return True

    def groups(self, coarse: bool) -> tuple[list[int], list[int]]:
        """Sizes of the parts of the source and their order in the view.

        The parts are the factors or, if ``coarse``, runs of factors that stay neighbors.
        """
        final = [factor for dim in self.dims for factor in dim]
        following = dict(pairwise(final))
        groups: list[list[int]] = []
        for factor in self.order:
            if coarse and groups and following.get(groups[-1][-1]) == factor:
                groups[-1].append(factor)
            else:
                groups.append([factor])
        position = {group[0]: index for index, group in enumerate(groups)}
        order = [position[factor] for factor in final if factor in position]
        return [prod(self.sizes[factor] for factor in group) for group in groups], order
