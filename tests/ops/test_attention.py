"""Attention as one operator, and the two forms of FlexAttention that a GPU runs for it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from sp_compiler.base.placement import Placement, R, S
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ops import attention as operators
from sp_compiler.ops.attention import DROPOUT_ATTENTION, DROPOUT_ATTENTION_BACKWARD
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout_mask
from sp_compiler.ops.gpu import attention as kernels
from tests.helpers.own_operators import Case, assert_registered, assert_right, node_of

SAMPLES, HEADS, QUERIES, KEYS = 4, 4, 9, 150  # keys of more than one block
SEED, SCALE, P, SITE = torch.tensor(7), 0.25, 0.3, 3
LAST = Communicator(None, 1, 2)
Mask = Tensor | None
LOWER = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool).tril()


def _normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _factors() -> tuple[Tensor, Tensor, Tensor]:
    rows = SAMPLES, HEADS
    # Queries as models have them: of heads that were split off.
    query = _normal(SAMPLES, QUERIES, HEADS, 8).transpose(1, 2)
    return query, _normal(*rows, KEYS, 8), _normal(*rows, KEYS, 16)


def _expected(mask: Mask, seed: Tensor | None, place: tuple[int, ...]) -> list[Tensor]:
    """The context and the gradients of the factors, by torch's own operators."""
    query, key, value = factors = [x.requires_grad_() for x in _factors()]
    scores = query @ key.mT * SCALE
    if mask is not None:
        # A query without any key has the context 0.
        alone = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask & ~alone, -math.inf)
        probs = scores.softmax(-1).masked_fill(alone, 0)
    else:
        probs = scores.softmax(-1)
    if seed is not None:
        probs = probs * dropout_mask(LAST, probs, seed, P, SITE, *place) / (1 - P)
    context = probs @ value
    grads = torch.autograd.grad(context, factors, _grad())
    return [context.detach(), *grads]


def _grad() -> Tensor:
    return _normal(SAMPLES, HEADS, QUERIES, 16)


def _by_operators(mask: Mask, seed: Tensor | None, place: tuple[int, ...]) -> list[Tensor]:
    given: Any = (mask, seed, SCALE, P, SITE, *place)
    factors = _factors()
    results = operators.dropout_attention(LAST, *factors, *given)
    grads = operators.dropout_attention_backward(LAST, _grad(), *factors, *results, *given)
    return [results[0], *grads]


def _by_kernels(mask: Mask, seed: Tensor | None, place: tuple[int, ...]) -> list[Tensor]:
    """What Inductor compiles for a GPU, by torch's own operators for FlexAttention."""
    given = kernels.Given(*_factors(), mask, seed, torch.tensor(SITE))
    dim, world_size, first_row, padding = (*place, 0, 0)[:4]
    where = kernels.Place(1, SCALE, P, dim, world_size, first_row, padding)
    context, logsumexp = kernels.compute(given, where)
    given = given._replace(grad=_grad(), context=context, logsumexp=logsumexp)
    return [context, *kernels.differentiate(given, where)]


@pytest.mark.parametrize("run", [_by_operators, _by_kernels])
@pytest.mark.parametrize(
    ("mask", "seed", "place"),
    [
        (None, None, (0, 1)),
        (None, SEED, (0, 1)),
        (LOWER, SEED, (1, 2)),  # heads are sharded, this is the second rank
        (LOWER, None, (0, 1)),
        # Random masks of each sample, some of whose queries may see no key, and padded heads.
        (_normal(SAMPLES, 1, QUERIES, KEYS) > 2.5, SEED, (1, 2, 5, 1)),
        (_normal(SAMPLES, HEADS, 1, KEYS) > 0, SEED, (0, 2)),
    ],
)
def test_context_and_gradients(
    run: Any, mask: Mask, seed: Tensor | None, place: tuple[int, ...]
) -> None:
    expected = _expected(mask, seed, place)
    for actual, each in zip(run(mask, seed, place), expected, strict=True):
        torch.testing.assert_close(actual, each, rtol=0, atol=1e-13)
        # Merging the heads of any of them takes no copy.
        assert actual.transpose(1, 2).is_contiguous()


def test_what_is_dropped_has_a_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own derivative of the change of scores knows nothing of what is dropped."""
    expected = _expected(LOWER, SEED, (0, 1))
    derivative = kernels._Scores.plain_derivative
    monkeypatch.setattr(kernels._Scores, "dropped_derivative", derivative)
    _, grad_query, _, grad_value = _by_kernels(LOWER, SEED, (0, 1))
    torch.testing.assert_close(grad_value, expected[3], rtol=0, atol=1e-13)
    assert (grad_query - expected[1]).abs().max() > 1e-2


def test_queries_without_keys_have_no_nan_where_all_is_masked() -> None:
    mask = torch.zeros(1, 1, 1, KEYS, dtype=torch.bool)
    for run in (_by_operators, _by_kernels):
        assert all(not x.any() for x in run(mask, SEED, (0, 1)))


def _given() -> tuple[kernels.Given, kernels.Place]:
    given = kernels.Given(*_factors(), None, SEED, torch.tensor(SITE))
    return given, kernels.Place(0, SCALE, P, 0, 1, 0, 0)


def test_what_cannot_be_compiled_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def compile_for(*args: Any) -> Any:
        tries.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernels, "compile_for", compile_for)
    monkeypatch.setattr(kernels, "_COMPILED", {})
    with pytest.warns(UserWarning, match=r"\[4, 4, 9, 8\] on cpu .* no such kernel"):
        assert kernels._run(kernels.compute, *_given()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels._run(kernels.compute, *_given()) is None
    assert len(tries) == 1


def test_a_lack_of_memory_is_no_lack_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kernels, "compile_for", compile_for)
    monkeypatch.setattr(kernels, "_COMPILED", {})
    with pytest.raises(torch.OutOfMemoryError):
        kernels._run(kernels.compute, *_given())
    assert not kernels._COMPILED


def test_layers_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a dropout is a tensor: neither it nor the seed is a reason to compile again."""
    compiled: list[Any] = []

    def compile_for(function: Any, given: Any, place: Any) -> Any:
        compiled.append(place)
        return lambda *tensors: [torch.stack([x.sum().double() for x in tensors]).sum()]

    monkeypatch.setattr(kernels, "compile_for", compile_for)
    monkeypatch.setattr(kernels, "_COMPILED", {})
    given, place = _given()
    first = kernels._run(kernels.compute, given, place)
    other = given._replace(site=torch.tensor(4), seed=torch.tensor(8))
    second = kernels._run(kernels.compute, other, place)
    assert first is not None
    assert second is not None
    assert second[0] - first[0] == pytest.approx(2)
    kernels._run(kernels.compute, given, place._replace(p=0.5))
    kernels._run(kernels.compute, given._replace(query=given.query[:, :, :5]), place)
    assert len(compiled) == 3


# As operators.

_OF_HEADS = _normal(1, HEADS, 1, KEYS) > -1
_ONE = Communicator(None, 0, 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("cut", "of_mask", "told"), [(R, R, 1), (S(0), R, 0), (S(1), S(1), 0)], ids=str
)
def test_placements(cut: Placement, of_mask: Placement, told: int, world_size: int) -> None:
    """``told``: number of ranks in the call; 0: all there are."""
    shape = SAMPLES, HEADS, QUERIES, KEYS
    kept = dropout_mask(_ONE, torch.empty(shape), SEED, P, SITE, 0, 1).double() / (1 - P)

    def dense(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        scores = (query @ key.mT * SCALE).masked_fill(~_OF_HEADS, -math.inf)
        return scores.softmax(-1) * kept @ value, scores.logsumexp(-1).detach()

    def gradients(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        return torch.autograd.grad(dense(*leaves)[0], leaves, grad.detach())

    rest = SCALE, P, SITE, cut.dim, told or world_size
    others, placed = [_OF_HEADS, SEED], (of_mask, R)
    factors = _factors()
    results = [x.detach() for x in dense(*factors)]
    backward = [_grad(), *factors, *results, *others]
    given, made = (cut,) * 6 + placed, (cut,) * 3
    assert_right(
        Case(DROPOUT_ATTENTION_BACKWARD, gradients, backward, rest, given, made), world_size
    )
    forward, given, made = [*factors, *others], (cut,) * 3 + placed, (cut,) * 2
    assert_right(Case(DROPOUT_ATTENTION, dense, forward, rest, given, made), world_size)


def test_registered() -> None:
    factors = [x.requires_grad_() for x in _factors()]
    assert_registered(DROPOUT_ATTENTION, *factors, LOWER, SEED, SCALE, P, SITE, 0, 1)
    results = [x.detach() for x in _by_operators(LOWER, None, (0, 1))[:1]]
    logsumexp = torch.zeros(SAMPLES, HEADS, QUERIES, dtype=torch.float64)
    given = [_grad(), *_factors(), *results, logsumexp, LOWER, None]
    assert_registered(DROPOUT_ATTENTION_BACKWARD, *given, SCALE, 0.0, 0, 0, 1)


@pytest.mark.parametrize(("placement", "told"), [("S(0)", 1), ("R", 2), ("S(1)", 2), ("S(2)", 2)])
def test_a_call_for_another_placement_is_not_declared(placement: str, told: int) -> None:
    """A shard as if replicated, a replicated value as a shard, other dims than that of the call."""
    node = node_of(DROPOUT_ATTENTION, [*_factors(), LOWER, SEED], (SCALE, P, SITE, 0, told))
    ways = declared_strategies(node, 2) or ()
    assert Placement.parse(placement) not in [way.operands[0] for way in ways]


def test_a_mode_of_the_caller_sees_nothing_of_a_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[int] = []

    def compile_for(*args: Any) -> Any:
        modes.append(len(_get_current_dispatch_mode_stack()))
        return lambda *tensors: [tensors[0]]

    monkeypatch.setattr(kernels, "compile_for", compile_for)
    monkeypatch.setattr(kernels, "_COMPILED", {})
    with FlopCounterMode(display=False):
        kernels._run(kernels.compute, *_given())
    assert modes == [0]
