"""Every model, sharded over simulated ranks, against its captured graph on one device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import parity
from tests.helpers.slow import slow, slow_but
from tests.models import zoo

_TIGHT = 1e-10

Setting = tuple[tuple[int, int], int, str, bool]
"""(batch and sequence size, number of ranks, recompute, sequence parallel)."""

Step = tuple[Tensor, dict[str, Tensor | None]]
"""First output and gradients."""

# Every two values of different columns are together in some row.
_PAIRWISE: list[Setting] = [
    ((4, 16), 2, "none", True),
    ((3, 13), 4, "selective", True),
    ((4, 16), 4, "attention", False),
    ((3, 13), 2, "full", False),
    ((1, 5), 2, "attention", True),
    ((1, 5), 4, "none", False),
    ((3, 13), 1, "attention", True),
    ((4, 16), 4, "full", True),
    ((4, 16), 1, "selective", False),
    ((1, 5), 1, "full", True),
    ((1, 5), 2, "selective", False),
    ((3, 13), 1, "none", False),
]
# One model of each architecture; the others differ from it in one respect.
_ARCHITECTURES = ("gpt2", "llama", "bert", "vit", "t5", "plain", "encoder", "lora")
# Of the model that is compiled in the shortest time; what only others have, of which a setting
# decides something else, has tests of its own: grouped heads, adapters, two stacks.
_EVERY_PAIR = ("gpt2",)
# Of those that differ from each other most, the quicker ones.
_FAST = ("gpt2", "bert", "vit", "plain", "encoder_seqfirst", "lora", "llama_gqa8")
# In each stack of T5 the first layer computes the biases of all.
_LAYERS = {"t5": 2}


def _cases(settings: dict[str, list[Setting]], fast: Sequence[str] = ()) -> list[Any]:
    """Test parameters by model and size, so that neighbours share a capture; all but those of the
    models ``fast`` are slow tests."""
    return [
        pytest.param(
            name,
            *setting,
            id=_label(name, *setting),
            marks=() if name in fast else pytest.mark.slow,
        )
        for name, rows in settings.items()
        for setting in sorted(rows)
    ]


def _label(name: str, size: tuple[int, int], tp: int, recompute: str, sequence: bool) -> str:
    return f"{name}-{size[0]}x{size[1]}-tp{tp}-{recompute}-{'sp' if sequence else 'nosp'}"


def _in_turn() -> dict[str, list[Setting]]:
    """One setting for each model, all of them over the zoo; more for the plain GPT.

    None for T5, whose seven regions take longest: it is in the test of everything.
    """
    chosen = {
        name: [_PAIRWISE[number % len(_PAIRWISE)]]
        for number, name in enumerate(zoo.names())
        if name != "t5"
    }
    return {**chosen, "plain": _PAIRWISE[:2]}


def _everything() -> dict[str, list[Setting]]:
    """All pairs of two values for one model; the others share them, two for each.

    The test before has another for each of these models but T5.
    """
    return {
        name: _PAIRWISE if name in _EVERY_PAIR else _PAIRWISE[number % 6 :: 6]
        for number, name in enumerate(_ARCHITECTURES)
    }


_COLUMNS = ("name", "size", "tp", "recompute", "sequence_parallel")


def _check(
    name: str, size: tuple[int, int], tp: int, recompute: str, sequence_parallel: bool
) -> None:
    # What else a model has is in its first layer, as what is frozen behind the input has no other.
    fields = {} if name in _ARCHITECTURES else {"layers": 1}
    parity.assert_parity(
        parity.case(name, *size, **fields),
        _TIGHT,
        tp=tp,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize(_COLUMNS, _cases(_in_turn(), fast=_FAST))
def test_parity(
    name: str, size: tuple[int, int], tp: int, recompute: str, sequence_parallel: bool
) -> None:
    _check(name, size, tp, recompute, sequence_parallel)


@pytest.mark.parametrize(_COLUMNS, _cases(_everything()))
def test_parity_of_everything(
    name: str, size: tuple[int, int], tp: int, recompute: str, sequence_parallel: bool
) -> None:
    fields = {} if name in _EVERY_PAIR else {"layers": _LAYERS.get(name, 1)}
    found = parity.case(name, *size, **fields)
    program = parity.compiled_in_turn(
        found, tp=tp, recompute=recompute, sequence_parallel=sequence_parallel
    )
    parity.assert_step(found, program, _TIGHT)


def test_pairwise_rows_cover() -> None:
    columns = list(zip(*_PAIRWISE, strict=True))
    for first, second in itertools.combinations(range(4), 2):
        wanted = set(itertools.product(columns[first], columns[second]))
        assert wanted == {(row[first], row[second]) for row in _PAIRWISE}


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("vit", 3),
        *(slow("llama", tp) for tp in (3, 8)),
        slow("gpt2", 8),
        *(slow(name, 3) for name in ("encoder", "t5")),
    ],
)
def test_what_does_not_divide_is_padded_or_whole(name: str, tp: int) -> None:
    """Four heads and a width of 32: eight ranks divide only widths, three nothing."""
    parity.assert_parity(parity.case(name, 2, 7, layers=1), _TIGHT, tp=tp)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ((1, 1), "plain"),
        *(slow(size, "plain") for size in ((1, 2), (2, 1))),
        slow((1, 1), "gpt2"),
        slow((1, 2), "llama"),
    ],
)
def test_smallest_inputs(name: str, size: tuple[int, int]) -> None:
    """Fewer tokens than ranks. No loss at length 1, which has nothing to predict."""
    name = name if size[1] > 1 else f"{name}_logits"
    parity.assert_parity(parity.case(name, *size, layers=1), _TIGHT, tp=4)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "ranks"),
    [
        ("gpt2", True, (2,)),
        slow("gpt2", False, (4,)),
        slow("llama", True, (1, 4)),
    ],
)
def test_gradient_of_inputs_embeds(
    name: str, sequence_parallel: bool, ranks: tuple[int, ...]
) -> None:
    """It is whole and the same on every rank; the simulation raises where ranks differ."""
    kwargs = zoo.inputs(name, 3, 13)
    generator = torch.Generator().manual_seed(5)
    embeds = torch.randn(3, 13, 32, generator=generator, dtype=torch.float64).requires_grad_()
    model = zoo.build(name, layers=1)
    found = parity.make_case(model, {"inputs_embeds": embeds, "labels": kwargs["labels"]})
    assert [grad is not None for grad in found.input_grads] == [True, False]
    for tp in ranks:
        parity.assert_parity(found, _TIGHT, tp=tp, sequence_parallel=sequence_parallel)


# In one lower precision each; in float64 those whose losses are computed in float32, and that are
# not compared in that below.
_IN_FLOAT64 = slow_but(("plain",), ("plain", "gpt2", "bert", "encoder"))


def _against_eager(name: str, dtype: torch.dtype, **options: Any) -> tuple[Step, Step]:
    """First output and gradients of the unlifted program on ranks, and of the model itself."""
    model = _model(name, dtype)
    kwargs = _inputs(name, dtype)
    found = parity.make_case(model, kwargs, lift_casts=False)
    step = parity.simulate(found, parity.compiled(found, **options))
    for grad, parameter in zip(step.grads.values(), model.parameters(), strict=True):
        assert grad is None or (grad.dtype, grad.shape) == (dtype, parameter.shape)
    first = next(item for item in step.outputs if isinstance(item, Tensor))
    expected, grads = _eager(model, kwargs)
    assert first.dtype == expected.dtype
    return (first, step.grads), (expected, grads)


def _model(name: str, dtype: torch.dtype) -> nn.Module:
    return zoo.build(name, dtype=dtype, layers=1)


def _inputs(name: str, dtype: torch.dtype) -> dict[str, Any]:
    kwargs = zoo.inputs(name, 3, 13)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in kwargs.items()}


def _eager(model: nn.Module, kwargs: dict[str, Any]) -> Step:
    output = model(**kwargs)
    first = output if isinstance(output, Tensor) else output[0]
    first.backward(torch.ones_like(first))
    return first.detach(), {name: value.grad for name, value in model.named_parameters()}


def _error(actual: Step, true: Step, floor: float) -> float:
    scale = float(true[0].abs().max())
    first = float((actual[0] - true[0]).abs().max()) / scale
    return max(first, parity.gradient_error(actual[1], true[1], floor))


@pytest.mark.parametrize("name", _IN_FLOAT64)
def test_against_eager_in_float64(name: str) -> None:
    """Without lifted casts: a loss that a model computes in float32 stays so."""
    actual, eager = _against_eager(name, torch.float64, tp=2)
    assert _error(actual, eager, 1e-5) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", _ARCHITECTURES[1::2])
def test_float32(name: str) -> None:
    """As near to the same parameters in float64 as the model itself, whose rounding differs from
    one kind of CPU to the next."""
    actual, eager = _against_eager(name, torch.float32, tp=4, recompute="full")
    model = _model(name, torch.float32).double()
    true = _eager(model, _inputs(name, torch.float64))
    assert _error(actual, true, 1e-2) < 2 * _error(eager, true, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", _ARCHITECTURES[::2])
def test_bfloat16(name: str) -> None:
    """As near to the same parameters in float64 as the model itself is in bfloat16."""
    actual, eager = _against_eager(name, torch.bfloat16, tp=2)
    model = _model(name, torch.bfloat16).double()
    true = _eager(model, _inputs(name, torch.float64))
    assert _error(actual, true, 0.1) < 2 * _error(eager, true, 0.1) + 0.02
