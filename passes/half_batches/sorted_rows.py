"""Rows of a batch that are sorted, as experts do with the rows of their tokens, and put back.

::

    keys, order = sort(experts of rows)
    sorted = x[order // k]                        # k rows of each token
    made = grouped_mm(sorted, w, cumsum(histc(keys)))
    made[argsort(order)]   or   zeros.index_add(0, order // k, made)

A sort mixes the batch, but a row's result does not depend on where the sort puts it. Each half
sorts its own rows, and row-by-row operators are correct in any order, provided that all operands
have the same one; put back, rows are the batch's again. The end offsets of the experts' rows must
be counted from the keys of the sort, sorted or not, and the keys must be non-negative integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.placement import R, S
from sp_compiler.ir.fx import arguments, is_call, is_getitem, shape_of
from sp_compiler.ir.op_traits import is_grouped_product
from sp_compiler.passes.expert_parallel.layers import SORTS, counted_ids, sort_of, uncast
from sp_compiler.passes.half_batches.rows import (
    BATCH_FIRST,
    Counts,
    Order,
    Places,
    Rows,
    Split,
    State,
    Unread,
)
from sp_compiler.passes.sharding.dim_roles import Value, value_of
from sp_compiler.rules.strategies import Strategy

_aten = torch.ops.aten
# The second result of these is an index into a dim; for the others below it is the only result.
_CHOOSE = (_aten.topk.default, _aten.max.dim, _aten.min.dim, _aten.sort.stable)
_CHOOSE_ONE = (_aten.argmax.default, _aten.argmin.default, _aten.argsort.stable)
_FIRST = S(0)
_StateOf = Callable[[Any], State | None]


def on_sorted_rows(node: Node, states: Mapping[Value, State]) -> Split | None:
    """Return how each half runs ``node``, which sorts rows or reads values that depend on their
    order; ``None`` if it is not known to be correct."""
    rule = _grouped_product if is_grouped_product(node) else _RULES.get(node.target)

    def state_of(argument: Any) -> State | None:
        return states.get(value_of(argument)) if isinstance(argument, Node) else None

    return None if rule is None else rule(node, state_of)


def _sort(node: Node, state_of: _StateOf) -> Split | None:
    keys = node.args[0]
    if len(shape_of(keys)) != 1 or arguments(node)["descending"]:
        return None
    of_keys = state_of(keys)
    if of_keys == BATCH_FIRST:
        made: tuple[State, ...] = (Rows(_FIRST, node), Order(node))
    elif isinstance(of_keys, Order) and of_keys.repeats == 1:
        made = (Unread(), Places(of_keys.sort))  # sorted, the indices are 0, 1, 2...
    else:
        return None
    made = made if isinstance(node.meta["val"], (tuple, list)) else made[1:]
    return Split(Strategy((_FIRST,), (_FIRST,) * len(made)), made)


def _divide(node: Node, state_of: _StateOf) -> Split | None:
    """From the index of a row to that of its token."""
    order, divisor = state_of(node.args[0]), node.args[1]
    # For non-negative numbers "trunc" is the same.
    rounds = arguments(node).get("rounding_mode", "floor") is not None
    if not (isinstance(order, Order) and type(divisor) is int and divisor > 0 and rounds):
        return None
    return Split(Strategy((_FIRST,), (_FIRST,)), (Order(order.sort, order.repeats * divisor),))


def _cast(node: Node, state_of: _StateOf) -> Split | None:
    state = state_of(node.args[0])
    if isinstance(state, Counts):
        return Split(Strategy((R,), (R,)), (state,))
    # In a smaller type the indices of a long batch would wrap, and those of a half would not.
    if isinstance(state, (Order, Places)) and node.meta["val"].dtype in (torch.int32, torch.int64):
        return Split(Strategy((_FIRST,), (_FIRST,)), (state,))
    return None


def _like(node: Node, state_of: _StateOf) -> Split | None:
    """Only the shape of the operand matters."""
    if not isinstance(state_of(node.args[0]), (Order, Places)):
        return None
    return Split(Strategy((_FIRST,), (_FIRST,)), (BATCH_FIRST,))


def _count(node: Node, state_of: _StateOf) -> Split | None:
    state = state_of(node.args[0])
    is_vector = len(shape_of(node.args[0])) == 1
    if not (is_vector and isinstance(state, Rows) and not state.placement.segments):
        return None
    return Split(Strategy((_FIRST,), (R,)), (Counts(),))


def _cumulate(node: Node, state_of: _StateOf) -> Split | None:
    state = state_of(node.args[0])
    return Split(Strategy((R,), (R,)), (state,)) if isinstance(state, Counts) else None


def _grouped_product(node: Node, state_of: _StateOf) -> Split | None:
    given = arguments(node)
    ends, state = given["offs"], state_of(node.args[0])
    if len(node.all_input_nodes) != 3 or ends is None or state_of(node.args[1]) is not None:
        return None
    if not isinstance(state, Rows) or state.placement != _FIRST or state.order is None:
        return None
    # Ends that depend only on inputs may be known, but they are those of the full batch.
    if not isinstance(state_of(ends), Counts) or not _are_ends(ends, state.order):
        return None
    return Split(Strategy((_FIRST, R, R), (_FIRST,)), (state,))


def _are_ends(ends: Node, sort: Node) -> bool:
    """Whether ``ends`` are those of the runs of equal keys that ``sort`` makes."""
    keys, ids = sort.args[0], counted_ids(ends)
    # Rows of negative keys would come first, and are not counted.
    if ids is None or not _numbers_experts(uncast(keys)):
        return False
    return _same(ids, uncast(keys)) or sort_of(ids) is sort


def _numbers_experts(node: Node) -> bool:
    """Whether ``node`` has non-negative integers, whatever the batch."""
    node = uncast(node)
    if is_getitem(node):
        return node.args[1] == 1 and node.args[0].target in _CHOOSE
    if node.target in _CHOOSE_ONE:
        return True
    if is_call(node, _aten.remainder.Scalar):
        divisor = node.args[1]
        return _is_whole(node) and isinstance(divisor, int) and divisor > 0
    if is_call(node, _aten.clamp.default):
        low = arguments(node)["min"]
        return _is_whole(node) and isinstance(low, int) and low >= 0
    if is_call(node, _aten.masked_fill.Scalar):
        value = node.args[2]
        return isinstance(value, int) and value >= 0 and _numbers_experts(node.args[0])
    return is_call(node, _aten.reshape.default) and _numbers_experts(node.args[0])


def _is_whole(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.int32, torch.int64)


def _same(left: Node, right: Node) -> bool:
    """Whether both are the same value, which a model may flatten twice."""
    reshape = _aten.reshape.default
    flattened = is_call(left, reshape) and is_call(right, reshape) and left.args == right.args
    return left is right or flattened


def _take(node: Node, state_of: _StateOf) -> Split | None:
    """Rows are picked: sorted, put back, or taken from a table, one for each row."""
    source, picks = _source_and_picks(node)
    of_source, of_picks = state_of(source), state_of(picks)
    if isinstance(of_picks, Order):
        if of_source != BATCH_FIRST or _rows(source) * of_picks.repeats != _rows(picks):
            return None
        return Split(Strategy((_FIRST, _FIRST), (_FIRST,)), (Rows(_FIRST, of_picks.sort),))
    if isinstance(of_picks, Places):
        if of_source != Rows(_FIRST, of_picks.sort):
            return None
        return Split(Strategy((_FIRST, _FIRST), (_FIRST,)), (BATCH_FIRST,))
    if isinstance(of_picks, Rows) and of_source is None:
        where = of_picks.placement
        return Split(Strategy((R, where), (where,)), (of_picks,))
    return None


def _source_and_picks(node: Node) -> tuple[Node, Node | None]:
    given = arguments(node)
    if "indices" in given:
        picks = given["indices"][0] if len(given["indices"]) == 1 else None
    else:
        picks = given["index"] if given["dim"] % len(shape_of(given["self"])) == 0 else None
    if picks is None or picks.meta["val"].dtype == torch.bool:
        return given["self"], None
    return given["self"], picks


def _put(node: Node, state_of: _StateOf) -> Split | None:
    """Sorted rows, or position numbers, are put or added where the rows came from."""
    given = arguments(node)
    base, places = _source_and_picks(node)
    values = next(given[name] for name in ("values", "source", "src") if name in given)
    order, adds = state_of(places), given.get("accumulate", is_call(node, _aten.index_add.default))
    if not isinstance(order, Order) or state_of(base) not in (None, BATCH_FIRST):
        return None
    if shape_of(values) != (_rows(places), *shape_of(base)[1:]):
        return None  # broadcasting may change what the rows are
    # Put, not added: every position must be written exactly once.
    if _rows(base) * order.repeats != _rows(places) or not (adds or order.repeats == 1):
        return None
    strategy = Strategy((_FIRST,) * 3, (_FIRST,))
    if not adds and _numbers(values, _rows(places)):
        return Split(strategy, (Places(order.sort),), numbered=frozenset({values}))
    return Split(strategy, (BATCH_FIRST,)) if state_of(values) == Rows(_FIRST, order.sort) else None


def _numbers(node: Node, rows: int) -> bool:
    """Whether ``node`` is 0, 1, 2... up to the number of rows."""
    if not is_call(node, _aten.arange.default, _aten.arange.start, _aten.arange.start_step):
        return False
    given = arguments(node)
    return (given.get("start", 0), given["end"], given.get("step", 1)) == (0, rows, 1)


def _rows(node: Node | None) -> int:
    return 0 if node is None or not shape_of(node) else shape_of(node)[0]


_RULES: dict[Any, Callable[[Node, _StateOf], Split | None]] = {
    **dict.fromkeys(SORTS, _sort),
    **dict.fromkeys((_aten.floor_divide.default, _aten.div.Tensor_mode), _divide),
    **dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default), _like),
    **dict.fromkeys((_aten.index.Tensor, _aten.index_select.default), _take),
    **dict.fromkeys((_aten.index_put.default, _aten.index_add.default, _aten.scatter.src), _put),
    _aten._to_copy.default: _cast,
    _aten.histc.default: _count,
    _aten.cumsum.default: _cumulate,
}
