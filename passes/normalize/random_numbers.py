"""Random numbers from the counter-based generator, the same for every number of ranks.

Dropout is a custom operator, which needs no random numbers in memory. All other distributions are
computed from uniform numbers by elementwise operators, which have sharding rules and are cheap to
recompute. Torch's generators are not advanced, and the values differ from theirs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import arguments, calls, is_getitem, shape_of
from sp_compiler.ir.op_traits import DRAWS, draws
from sp_compiler.ir.program import Ref
from sp_compiler.ir.rewriting import (
    fake_mode_of,
    insert_call,
    replace_call,
    replace_with,
    set_value,
)
from sp_compiler.ops.dropout import DROPOUT, DROPOUT_MASK
from sp_compiler.ops.uniform import UNIFORM

_ORIGIN = Pass.NORMALIZE
_aten = torch.ops.aten
_SITE = 3
"""Position of the site among the arguments of every operator in ``DRAWS``."""


def draw_by_counter(captured: Captured, *, stored: bool) -> None:
    """Rewrite every operator of the graph of ``captured`` that draws random numbers, in place.

    - ``native_dropout(x, p, True)[0]`` -> ``dropout(x, seed, p, site, dim=0, world_size=1)``;
      stored: ``native_dropout_backward(x, dropout_mask(x, seed, p, site, 0, 1), 1 / (1 - p))``,
      which multiplies by the mask and has a derivative
    - ``rand`` -> ``u = uniform(seed, size, dtype, site, dim=0, world_size=1)``
    - ``uniform``, ``randint`` -> ``u``, scaled and rounded down
    - ``bernoulli`` -> ``abs(floor(u - p))``
    - ``randn``, ``normal``, ``log_normal``, ``exponential``, ``geometric``, ``cauchy`` -> the
      inverse of their distribution function at ``u``
    - ``multinomial`` -> the largest of ``p / -log(u)``; ``randperm`` -> the order of ``u``
    - ``rrelu`` in training -> ``where(x > 0, x, x * u)`` with ``u`` scaled

    The graph gets one more placeholder, ``seed``. Sites are numbered in graph order.

    Raises:
        UnsupportedError: another distribution, or the model's own generator.
    """
    graph = captured.module.graph
    for node in list(graph.nodes):
        if node.target is _aten.native_dropout.default:
            _replace_dropout(captured, node, stored)
        elif draws(node):
            distribution = _DISTRIBUTIONS.get(node.target)
            if distribution is None or not distribution.makes(node.meta["val"].dtype):
                raise UnsupportedError(
                    f"operator {node.target} draws random numbers in a way that the compiler does "
                    "not support; draw them outside of the model and pass them in, or call "
                    f"model.eval()\n{node_origin(node)}"
                )
            numbers = distribution.draw(_Draw(captured, node))
            replace_with(node, _of_type(node, numbers))
    # Numbered only now: until then equal calls are identical, and the cache of fake results serves
    # all but the first.
    for site, node in enumerate(calls(graph, *DRAWS)):
        node.update_arg(_SITE, site)


def _replace_dropout(captured: Captured, node: Node, stored: bool) -> None:
    x, p, train = node.args
    assert isinstance(x, Node)
    result = _only_result(node)
    if train is False or p == 0:
        replace_with(result, x)
    elif p == 1:  # the scale 1 / (1 - p) would be infinite
        replace_call(result, _aten.mul.Tensor, (x, 0.0), origin=_ORIGIN)
    else:
        args = (x, _seed(captured), p, 0, 0, 1)
        if stored:
            mask = insert_call(result, DROPOUT_MASK.overload, args, origin=_ORIGIN)
            applied = (x, mask, 1 / (1 - float(p)))
            apply = _aten.native_dropout_backward.default
            replace_call(result, apply, applied, origin=_ORIGIN, name="dropout")
        else:
            replace_call(result, DROPOUT.overload, args, origin=_ORIGIN, name="dropout")
    node.graph.erase_node(node)


def _only_result(node: Node) -> Node:
    results = [user for user in node.users if is_getitem(user)]
    if len(results) != 1 or results[0].args[1] != 0:
        raise UnsupportedError(
            "the model uses the mask of a dropout, not only its result: draw a mask with "
            f"torch.rand_like(x) >= p and use that for both\n{node_origin(node)}"
        )
    return results[0]


def _seed(captured: Captured) -> Node:
    """Return the placeholder of the seed, created at the first use."""
    placeholders = captured.placeholders
    if captured.refs and captured.refs[-1].kind == "seed":
        return placeholders[-1]
    values = [node.meta["val"] for node in placeholders]
    tensors = [value for value in values if isinstance(value, Tensor)]
    # Random numbers are drawn on the seed's device: that of the first tensor, as at run time.
    device = tensors[0].device if tensors else torch.device("cpu")
    graph = captured.module.graph
    mode = fake_mode_of(graph)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        seed = graph.placeholder("seed")
    with mode:
        set_value(seed, torch.zeros((), dtype=torch.int64, device=device))
    captured.refs.append(Ref("seed"))
    return seed


def _of_type(node: Node, numbers: Node) -> Node:
    """Return ``numbers`` cast to the dtype of ``node``."""
    dtype = node.meta["val"].dtype
    if numbers.meta["val"].dtype is dtype:
        return numbers
    return insert_call(node, _aten._to_copy.default, (numbers,), {"dtype": dtype}, origin=_ORIGIN)


class _Draw:
    """A call that draws, and the nodes that compute its numbers, inserted before it."""

    def __init__(self, captured: Captured, node: Node) -> None:
        self.node = node
        self.given = arguments(node)
        self._captured = captured
        # Operands count too: the result of multinomial is integers, its weights are floats.
        types = {x.meta["val"].dtype for x in (node, *node.all_input_nodes)}
        self.dtype = torch.float64 if torch.float64 in types else torch.float32
        """Dtype of intermediate values: 16-bit types have too few values for the tails."""

    def uniform(
        self, dtype: torch.dtype | None = None, size: tuple[int, ...] | None = None
    ) -> Node:
        """Return uniform numbers between 0 and 1, both exclusive, in the shape of the result."""
        shape = list(shape_of(self.node) if size is None else size)
        args = (_seed(self._captured), shape, dtype or self.dtype, 0, 0, 1)
        return self.apply(UNIFORM.overload, *args)

    def between(self, low: float, high: float) -> Node:
        """Return uniform numbers in an interval."""
        return self.scaled(self.uniform(), high - low, low)

    def normal(self, mean: Any = 0.0, std: Any = 1.0) -> Node:
        """Return normal numbers; ``mean`` and ``std`` get no gradient, as in torch."""
        numbers = self.apply(_aten.special_ndtri.default, self.uniform())
        return self.scaled(numbers, self.constant(std), self.constant(mean))

    def scaled(self, x: Node, factor: Any, offset: Any) -> Node:
        """Return ``x * factor + offset``, without operations that have no effect."""
        if isinstance(factor, Node) or factor != 1:
            x = self.apply(_aten.mul.Tensor, x, factor)
        if isinstance(offset, Node) or offset != 0:
            x = self.apply(_aten.add.Tensor, x, offset)
        return x

    def constant(self, value: Any) -> Any:
        """Return an argument without gradient, in the dtype of intermediate values."""
        if not isinstance(value, Node):
            return value
        if value.meta["requires_grad"]:
            value = self.apply(_aten.detach.default, value)
        if value.meta["val"].dtype is self.dtype:
            return value
        return self.apply(_aten._to_copy.default, value, dtype=self.dtype)

    def log_uniform(self) -> Node:
        return self.apply(_aten.log.default, self.uniform())

    def apply(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return insert_call(self.node, target, args, kwargs, origin=_ORIGIN)


def _rand(draw: _Draw) -> Node:
    # In the type of the result: a value close to 1 would be rounded to 1 by a cast.
    return draw.uniform(draw.node.meta["val"].dtype)


def _uniform(draw: _Draw) -> Node:
    # In the type of the result, as in ``_rand``: a value close to ``high`` would be rounded to it.
    low, high = draw.given["from"], draw.given["to"]
    return draw.scaled(draw.uniform(draw.node.meta["val"].dtype), high - low, low)


def _normal(draw: _Draw) -> Node:
    return draw.normal(draw.given.get("mean", 0.0), draw.given.get("std", 1.0))


def _log_normal(draw: _Draw) -> Node:
    return draw.apply(_aten.exp.default, _normal(draw))


def _bernoulli(draw: _Draw) -> Node:
    p = draw.constant(draw.given.get("p", draw.given["self"]))
    # Not ``u < p``: booleans are replicated, floating-point values can be sharded. The sign of a
    # difference is exact: p = 0 never gives 1, and p = 1 always does.
    excess = draw.apply(_aten.sub.Tensor, draw.uniform(), p)
    # 0 or -1; abs, because the negative of 0 would be -0.
    return draw.apply(_aten.abs.default, draw.apply(_aten.floor.default, excess))


def _randint(draw: _Draw) -> Node:
    low, high = draw.given.get("low", 0), draw.given["high"]
    # In float64, which represents every integer of a range of up to 2^53.
    numbers = draw.scaled(draw.uniform(torch.float64), high - low, 0)
    numbers = draw.apply(_aten.floor.default, numbers)
    if max(abs(low), abs(high)) >= 2**53:
        numbers = draw.apply(_aten._to_copy.default, numbers, dtype=torch.int64)
    return draw.scaled(numbers, 1, low)


def _exponential(draw: _Draw) -> Node:
    return draw.apply(_aten.mul.Tensor, draw.log_uniform(), -1 / draw.given["lambd"])


def _geometric(draw: _Draw) -> Node:
    """Number of the first success: an exponential number of trials, rounded up."""
    p = draw.given["p"]
    trials = draw.scaled(draw.log_uniform(), 1 / math.log1p(-p) if p < 1 else 0.0, 0)
    return draw.scaled(draw.apply(_aten.floor.default, trials), 1, 1)


def _cauchy(draw: _Draw) -> Node:
    angles = draw.scaled(draw.uniform(), math.pi, -math.pi / 2)
    numbers = draw.apply(_aten.tan.default, angles)
    return draw.scaled(numbers, draw.given["sigma"], draw.given["median"])


def _rrelu(draw: _Draw) -> Node:
    x = draw.given["self"]
    slope = _of_type(draw.node, draw.between(draw.given["lower"], draw.given["upper"]))
    is_positive = draw.apply(_aten.gt.Scalar, x, 0)
    return draw.apply(_aten.where.self, is_positive, x, draw.apply(_aten.mul.Tensor, x, slope))


def _multinomial(draw: _Draw) -> Node:
    weights = draw.constant(draw.given["self"])
    shape, count = shape_of(weights), draw.given["num_samples"]
    if draw.given["replacement"] and count != 1:
        # The first class at which the cumulative weight exceeds a share of the total: a class of
        # weight 0 never does. A share below 1 of the total is rounded to less than the total.
        sums = draw.apply(_aten.cumsum.default, weights, -1)
        total = draw.apply(_aten.slice.Tensor, sums, -1, shape[-1] - 1, shape[-1])
        share = draw.apply(_aten.mul.Tensor, draw.uniform(), total)
        return draw.apply(_aten.searchsorted.Tensor, sums, share, right=True)
    # A race of exponential clocks with the weights as rates: a class wins with probability
    # proportional to its weight, and the next places are draws without replacement.
    times = draw.apply(_aten.log.default, draw.uniform(size=shape))
    speed = draw.apply(_aten.div.Tensor, weights, draw.apply(_aten.neg.default, times))
    first = draw.apply(_aten.topk.default, speed, count, -1)
    speeds, places = (draw.apply(operator.getitem, first, index) for index in (0, 1))
    # Classes of weight 0 are never drawn. Where torch raises because too few classes remain, the
    # result is one past the last class, on which an embedding or index raises: a check here would
    # make the host wait for the values.
    can_win = draw.apply(_aten.gt.Scalar, speeds, 0)
    return draw.apply(_aten.where.ScalarOther, can_win, places, shape[-1])


def _randperm(draw: _Draw) -> Node:
    # In float64: among many float32 values, with 24 bits, some would be equal and keep their order.
    numbers = draw.uniform(torch.float64)
    order = draw.apply(_aten.sort.stable, numbers, stable=True, dim=-1, descending=False)
    return draw.apply(operator.getitem, order, 1)


@dataclass(frozen=True)
class _Distribution:
    """Computation of a distribution, and its dtypes.

    Attributes:
        integers: whether the result may also be integers or booleans.
    """

    draw: Callable[[_Draw], Node]
    integers: bool = False

    def makes(self, dtype: torch.dtype) -> bool:
        # No complex numbers: torch scales their parts by 1 / sqrt(2) (randn) or not at all (rand),
        # and inverse distribution functions are defined for real numbers only.
        return dtype.is_floating_point or (self.integers and not dtype.is_complex)


_DISTRIBUTIONS: dict[object, _Distribution] = {
    _aten.rand.default: _Distribution(_rand),
    _aten.rand_like.default: _Distribution(_rand),
    _aten.uniform.default: _Distribution(_uniform),
    _aten.randn.default: _Distribution(_normal),
    _aten.randn_like.default: _Distribution(_normal),
    _aten.normal.Tensor_float: _Distribution(_normal),
    _aten.normal.float_Tensor: _Distribution(_normal),
    _aten.normal.Tensor_Tensor: _Distribution(_normal),
    _aten.normal.float_float: _Distribution(_normal),
    _aten.normal_functional.default: _Distribution(_normal),
    _aten.log_normal.default: _Distribution(_log_normal),
    _aten.bernoulli.default: _Distribution(_bernoulli, integers=True),
    _aten.bernoulli.p: _Distribution(_bernoulli, integers=True),
    _aten.bernoulli.Tensor: _Distribution(_bernoulli, integers=True),
    _aten.randint.default: _Distribution(_randint, integers=True),
    _aten.randint.low: _Distribution(_randint, integers=True),
    _aten.randint_like.default: _Distribution(_randint, integers=True),
    _aten.randint_like.low_dtype: _Distribution(_randint, integers=True),
    _aten.exponential.default: _Distribution(_exponential),
    _aten.geometric.default: _Distribution(_geometric, integers=True),
    _aten.cauchy.default: _Distribution(_cauchy),
    _aten.rrelu.default: _Distribution(_rrelu),
    _aten.multinomial.default: _Distribution(_multinomial, integers=True),
    _aten.randperm.default: _Distribution(_randperm, integers=True),
}
