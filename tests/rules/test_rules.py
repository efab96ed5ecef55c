"""Every rule with every strategy it offers, on random calls, against the whole operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.placement import P, S, T
from sp_compiler.rules.factors import Dims, Factor, OpRule
from sp_compiler.rules.families.elementwise import pointwise
from sp_compiler.rules.registry import ROWS, Row
from tests.helpers.one_operator import Step, check, compiled_step
from tests.helpers.op_samples import calls as op_samples
from tests.helpers.operator_call import Call, Whole, offered
from tests.helpers.slow import slow_but

# Some random calls are such as torch warns of: they are right all the same.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The reduce argument of torch.scatter", "ignore:var", "ignore:The use of `x.T`"
)
aten = torch.ops.aten
sp = torch.ops.sp_compiler
_IN_TABLE = [target for name in ROWS for target in op_samples.overloads(name)]
_ON_CPU = [target for target in _IN_TABLE if target not in op_samples.NEED_GPU]
_FAST = [target for target in _ON_CPU if not op_samples.is_like_another(target)]
_VOCABULARY = [aten.embedding.default, aten.cross_entropy_loss.default]
_POINTWISE = [target for target in op_samples.pointwise() if target not in _IN_TABLE]


def check_all(target: Any, world_size: int, count: int, step: Step | None = None) -> set[str]:
    """Kinds of placements that were compared; what fails says for which call and strategy.

    With a ``step`` the check may refuse a strategy for what its backward would have to do: the
    compiler then runs the operator whole.
    """
    kinds: set[str] = set()
    for call in op_samples.calls(target, world_size, count):
        whole = Whole.of(call)
        for strategy in offered(whole, world_size):
            try:
                check(whole, strategy, world_size, step)
            except PlacementError:
                if step is None:
                    raise
                continue
            except (AssertionError, RuntimeError, ValueError) as error:
                if step is not None and "derivative for" in str(error):
                    continue  # PyTorch has none
                shapes = [tuple(x.shape) for x in call.tensors]
                ways = (", ".join(map(str, ps)) for ps in (strategy.operands, strategy.results))
                error.add_note(
                    f"{target} of {shapes} at tp={world_size}: {' -> '.join(ways)}\n{call}"
                )
                raise
            kinds.update(placement.kind for placement in (*strategy.operands, *strategy.results))
    return kinds


@pytest.mark.parametrize("target", [*_FAST, aten.cross_entropy_loss.default], ids=str)
def test_every_strategy(target: Any) -> None:
    check_all(target, 2, 2)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_only_a_quotient_that_is_not_rounded_passes_sums_on(mode: str | None) -> None:
    call = Call(aten.div.Tensor_mode, (torch.ones(4, 6), 3.0), {"rounding_mode": mode})
    takes_sums = any(P in strategy.operands for strategy in offered(Whole.of(call), 2))
    assert takes_sums is (mode is None)


@pytest.mark.parametrize("target", slow_but(_POINTWISE[::2], _POINTWISE), ids=str)
def test_every_strategy_of_pointwise_operators(target: Any) -> None:
    check_all(target, 2, 1)


# Of one call: that rules know the arguments of others, two ranks have shown above.
@pytest.mark.slow
@pytest.mark.parametrize("target", [*_ON_CPU, *_VOCABULARY], ids=str)
def test_every_strategy_on_four_ranks(target: Any) -> None:
    check_all(target, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [each for each in [*_ON_CPU, *_VOCABULARY][::3] if not op_samples.is_like_another(each)],
    ids=str,
)
def test_strategies_in_generated_code(target: Any) -> None:
    check_all(target, 2, 1, compiled_step)


@pytest.mark.parametrize("name", ROWS)
def test_no_rule_is_left_without_a_call(name: str) -> None:
    targets = op_samples.overloads(name)
    assert targets, f"{name} is in the table but is no operator on tensors"
    for target in targets:
        if target not in op_samples.NEED_GPU:
            assert list(op_samples.calls(target, 2, 1))


def test_every_kind_of_placement_is_offered() -> None:
    """The comparison would be empty if rules offered nothing."""
    assert check_all(aten.add.Tensor, 2, 6) == {"R", "I", "P", "S", "T"}
    assert check_all(aten.linear.default, 2, 6) == {"R", "I", "P", "S", "T"}
    assert check_all(aten._softmax_backward_data.default, 2, 6) == {"R", "I", "P", "S"}


_INDEX = torch.tensor([[0, 1]])


@pytest.mark.parametrize(
    ("target", "args", "is_linear"),
    [
        (aten.clone.default, (torch.randn(2, 2, dtype=torch.complex128),), True),
        (aten._to_copy.default, (torch.ones(2, 2, dtype=torch.int64),), False),
        (aten.scatter.value, (torch.randn(2, 2).double(), 0, _INDEX, 0.0), True),
        (aten.scatter.value, (torch.randn(2, 2).double(), 0, _INDEX, 0.5), False),
    ],
)
def test_what_partial_sums_pass_through(
    target: Any, args: tuple[Any, ...], is_linear: bool
) -> None:
    whole = Whole.of(Call(target, args, {}))
    ways = [strategy for strategy in offered(whole, 2) if strategy.operands[0] == P]
    assert bool(ways) == is_linear
    for way in ways:
        check(whole, way, 2)


@pytest.mark.parametrize(
    ("values", "is_sharded"), [((4, 3), True), ((4, 5), True), ((6, 3), False)], ids=str
)
@pytest.mark.parametrize("target", [aten.scatter.src, aten.scatter_add.default], ids=str)
def test_values_put_at_indices_are_sharded_like_these(
    target: Any, values: tuple[int, ...], is_sharded: bool
) -> None:
    """There may be more values than indices: the first are put. Each row has its own values."""
    # Integers, as torch has no gradient of such values.
    given, index = torch.arange(28).view(4, 7), torch.tensor([[0, 2, 5], [6, 1, 3]] * 2)
    put = 100 + torch.arange(math.prod(values)).view(values)
    whole = Whole.of(Call(target, (given, 1, index, put), {}))
    ways = list(offered(whole, 2))
    assert any(way.results == (S(0),) for way in ways) is is_sharded
    for way in ways:
        check(whole, way, 2)


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (aten.gather.default, ()),
        (aten.scatter.src, (torch.tensor(3.0).double(),)),
        (aten.scatter.value, (0.0,)),
    ],
    ids=str,
)
def test_a_vector_takes_a_single_number_as_an_index(target: Any, values: tuple[Any, ...]) -> None:
    given = torch.randn(6).double()
    whole = Whole.of(Call(target, (given, 0, torch.tensor(2), *values), {}))
    for way in offered(whole, 2):
        check(whole, way, 2)


def test_an_unbind_leaves_every_other_dim_to_be_sharded() -> None:
    whole = Whole.of(Call(aten.unbind.int, (torch.randn(4, 3, 6).double(), 1), {}))
    ways = {(way.operands[0], way.results[0]) for way in offered(whole, 2)}
    assert {(S(0), S(0)), (S(2), S(1))} <= ways
    assert not [way for way in ways if way[0] == S(1)]


@pytest.mark.parametrize("batch", [(), (2,), (2, 4)], ids=str)
def test_heads_and_batch_of_attention_are_sharded_whatever_is_in_front(
    batch: tuple[int, ...],
) -> None:
    """Such as windows; queries and keys are not, nor is the width of a head."""
    query = torch.randn(*batch, 6, 4, 2).double()
    attention = aten.scaled_dot_product_attention.default
    whole = Whole.of(Call(attention, (query, query + 1, query - 1), {"is_causal": True}))
    ways = list(offered(whole, 2))
    cut = {way.results[0].dim for way in ways if way.results[0].kind == "S"}
    assert cut == set(range(len(batch) + 1))
    for way in ways:
        check(whole, way, 2)


def test_attention_of_keys_without_the_batch_of_the_queries_has_no_rule() -> None:
    query, key = torch.randn(2, 2, 8).double(), torch.randn(4, 8).double()
    attention = aten.scaled_dot_product_attention.default
    whole = Whole.of(Call(attention, (query, key, key), {}))
    assert not [way for way in offered(whole, 2) if way.results[0].is_sharded]


@pytest.mark.parametrize(("right", "merged"), [((8, 6), True), ((1, 8, 6), False)], ids=str)
def test_rows_of_a_product_are_merged_for_one_matrix(right: tuple[int, ...], merged: bool) -> None:
    """A batch of one matrix would be a batch of the merged rows too."""
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(shape, generator=generator).double() for shape in ((2, 4, 8), right))
    whole = Whole.of(Call(aten.matmul.default, tuple(tensors), {}))
    strategies = list(offered(whole, 2))
    for strategy in strategies:
        check(whole, strategy, 2)
    results = {strategy.results[0] for strategy in strategies}
    assert (T(2) in results) == merged


# Rules that lie.


def _unblocked(rule: OpRule) -> OpRule:
    """Says that what is mixed may be sharded."""
    return _renamed(rule, lambda factor: replace(factor, blocked=False))


def _renamed(rule: OpRule, change: Callable[[Factor], Factor]) -> OpRule:
    def of(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(map(change, dim)) for dim in dims) for dims in tensors)

    return replace(rule, operands=of(rule.operands), results=of(rule.results))


def _swapped(position: int) -> Callable[[OpRule], OpRule]:
    """Names two dims of an operand the wrong way round."""

    def change(rule: OpRule) -> OpRule:
        operands = list(rule.operands)
        operands[position] = operands[position][::-1]
        return replace(rule, operands=tuple(operands))

    return change


def _linear(*sets: tuple[int, ...]) -> Callable[[OpRule], OpRule]:
    return lambda rule: replace(rule, linear=sets)


def _summed(rule: OpRule) -> OpRule:
    """Says that what the result lacks is summed over."""
    rule = _unblocked(rule)
    of_results = {factor for dims in rule.results for dim in dims for factor in dim}
    of_operands = {factor for dims in rule.operands for dim in dims for factor in dim}
    return replace(rule, contracted=tuple(of_operands - of_results), averaged=())


def _averaged(rule: OpRule) -> OpRule:
    """Says that a mean is taken of what the result lacks."""
    lie = _summed(rule)
    return replace(lie, contracted=(), averaged=lie.contracted)


def _whole_first(rule: OpRule) -> OpRule:
    """Forgets that the first operand has the factors of the result."""
    return replace(rule, operands=(tuple(() for _ in rule.operands[0]), *rule.operands[1:]))


_LIES: list[tuple[Any, Callable[[OpRule], OpRule]]] = [
    (aten.linear.default, _swapped(1)),
    (aten.linear.default, _linear((0, 1))),
    (aten.mm.default, _swapped(0)),
    (aten.matmul.default, _linear((0, 1))),
    (aten.matmul.default, lambda rule: replace(rule, rows="leading")),
    (aten.gelu.default, _linear((0,))),
    (aten.mul.Tensor, _linear((0, 1))),
    (aten.add.Tensor, _linear((0,), (1,))),
    (aten.add.Tensor, _whole_first),
    (aten.add.Tensor, lambda rule: replace(rule, rows="relabel")),
    (aten.softmax.int, _unblocked),
    (aten.cumsum.default, _unblocked),
    (aten.layer_norm.default, _unblocked),
    (aten.mean.dim, _summed),
    (aten.amax.default, _summed),
    (aten.amax.default, _averaged),
    (aten.sum.dim_IntList, _averaged),
    (aten.embedding.default, _summed),
    (aten.embedding.default, lambda rule: replace(rule, rows="broadcast")),
    (aten.transpose.int, _swapped(0)),
    (aten.slice.Tensor, _unblocked),
    (aten.flip.default, _unblocked),
    (aten.roll.default, _unblocked),
    (aten.cat.default, _unblocked),
    (aten.constant_pad_nd.default, _unblocked),
    (aten.constant_pad_nd.default, _linear((0,))),
    (aten.masked_fill.Scalar, _linear((0,))),
    (aten.split_with_sizes.default, lambda rule: replace(rule, split=(0, (2, 2)))),
    (aten.index.Tensor, _summed),
    (aten.baddbmm.default, lambda rule: replace(rule, rows="leading")),
    (aten.max_pool2d.default, _unblocked),
    (aten.max_pool2d.default, _linear((0,))),
    (aten.im2col.default, _unblocked),
    (aten.embedding_bag.default, _unblocked),
    (aten.prelu.default, _linear((0,))),
    (aten.cdist.default, _summed),
    (aten.logcumsumexp.default, _linear((0,))),
    (aten.scaled_dot_product_attention.default, _linear((1,))),
    (aten._softmax_backward_data.default, _unblocked),
    (aten.native_layer_norm_backward.default, _unblocked),
    (aten.embedding_dense_backward.default, _whole_first),
    (aten.slice_backward.default, _unblocked),
    (sp.dropout.default, lambda rule: replace(rule, placed=False)),
]


@pytest.mark.parametrize(("target", "lie"), _LIES, ids=lambda part: getattr(part, "__name__", ""))
def test_a_rule_that_lies_is_found(
    target: Any, lie: Callable[[OpRule], OpRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = target._schema.name
    true = ROWS.get(name, Row(pointwise))

    def lying(node: torch.fx.Node) -> OpRule | None:
        rule = true.factors(node)
        return None if rule is None else lie(rule)

    monkeypatch.setitem(ROWS, name, replace(true, factors=lying))
    with pytest.raises((AssertionError, LookupError, RuntimeError, ValueError)):
        check_all(target, 2, 30)
