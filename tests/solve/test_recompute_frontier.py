"""The saved values of a forward, against brute force over all subsets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.passes.memory.candidates import recompute_problem
from sp_compiler.passes.memory.partition import PartitionOptions
from sp_compiler.solve.recompute_frontier import (
    Choice,
    ForwardValue,
    SavingProgram,
    evaluate,
    frontier,
)
from sp_compiler.trace.joint import JointGraph
from tests.helpers.compiled_region import differentiate
from tests.helpers.regions import region_of


@st.composite
def _forwards(draw: st.DrawFn) -> list[ForwardValue]:
    values = []
    for index in range(draw(st.integers(2, 8))):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        values.append(
            ForwardValue(
                parents=tuple(sorted(parents)),
                num_bytes=draw(st.sampled_from([0, 2, 8, 8, 64, 1000])) * 12345,
                time_us=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 100.0])),
                needed=draw(st.booleans()),
                can_keep=draw(st.integers(0, 5)) > 0,
                can_repeat=draw(st.integers(0, 5)) > 0,
            )
        )
    return values


def _sets(indices: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(len(indices) + 1):
        yield from map(frozenset, itertools.combinations(indices, size))


def _subsets(values: Sequence[ForwardValue], host_us: float) -> list[Choice]:
    """Cost of every allowed set of kept values, and of values sent to the host."""
    keepable = [index for index, value in enumerate(values) if value.can_keep]
    sendable = [index for index, value in enumerate(values) if value.can_send and host_us]
    return [
        found
        for kept in _sets(keepable)
        for sent in _sets([index for index in sendable if index not in kept])
        if sum(values[index].send_us for index in sent) <= host_us
        and (found := evaluate(values, kept, sent)) is not None
    ]


def _assert_solved(values: Sequence[ForwardValue], host_us: float = 0.0) -> None:
    every = _subsets(values, host_us)
    for limit in sorted({0, *(choice.num_bytes for choice in every)})[:12]:
        fitting = [(c.time_us, c.num_bytes) for c in every if c.num_bytes <= limit]
        found = SavingProgram(values, host_us).solve(limit)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert (found.time_us, found.num_bytes) == pytest.approx(min(fitting), rel=1e-9)
    best = frontier(values, host_us=host_us)
    for choice in best:
        assert not any(
            c.time_us < choice.time_us and c.num_bytes <= choice.num_bytes for c in every
        )
    for less, more in itertools.pairwise(best):
        assert less.num_bytes < more.num_bytes
        assert less.time_us > more.time_us
    if every:
        assert best[0].num_bytes == min(c.num_bytes for c in every)
        assert best[-1].time_us == pytest.approx(min(c.time_us for c in every), rel=1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_forwards())
def test_choices_are_those_of_brute_force(values: list[ForwardValue]) -> None:
    _assert_solved(values)


@st.composite
def _sendable(draw: st.DrawFn) -> list[ForwardValue]:
    """Without ties by a few bytes, of which HiGHS stops short."""
    return [
        replace(
            value,
            num_bytes=draw(st.sampled_from([64, 500, 1000])) * 12345,
            time_us=value.time_us + 0.5 + index / 16,
            can_send=draw(st.booleans()),
            sent_bytes=draw(st.sampled_from([16, 160])) * 12345,
            send_us=draw(st.sampled_from([1.0, 2.0, 5.0])),
            beside_us=0.25 + index / 64,
        )
        for index, value in enumerate(draw(_forwards()))
    ]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(_sendable(), st.sampled_from([3.0, 7.0]))
def test_choices_with_a_link_are_those_of_brute_force(
    values: list[ForwardValue], host_us: float
) -> None:
    _assert_solved(values, host_us)


class _Small(nn.Module):
    """Norm, linear, activation, dropout and a residual: 14 values that may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        gate = torch.sigmoid(hidden) * hidden.exp()
        return x + torch.tanh(self.down(gate * hidden))


def _small() -> JointGraph:
    return differentiate(region_of(_Small(), torch.randn(32, 16)))


def test_a_chain_that_the_backend_fuses_is_recomputed_for_what_its_kernel_takes() -> None:
    joint = _small()
    apart_us, fused_us = (
        {
            node.name: value.time_us
            for node, value in zip(*recompute_problem(joint, 1, frozenset(), options), strict=True)
        }
        for options in (PartitionOptions(), PartitionOptions(fused=True))
    )
    products = [name for name in apart_us if "linear" in name]
    assert products
    assert [fused_us[name] for name in products] == [apart_us[name] for name in products]
    # All three multiply numbers that the kernel has at hand, and backward reads two of the results.
    chain = ["exp", "mul", "mul_1"]
    assert sum(fused_us[name] for name in chain) < 0.5 * sum(apart_us[name] for name in chain)


def test_a_block_of_up_to_fourteen_candidates_is_solved_like_brute_force() -> None:
    joint = _small()
    nodes, values = recompute_problem(joint, 1, frozenset(), PartitionOptions())
    assert 10 <= sum(value.can_keep for value in values) <= 14
    _assert_solved(values)
    # What the model returns is there until backward in any case.
    position = nodes.index(joint.outputs[0])
    assert values[position].num_bytes > 0
    _, free = recompute_problem(joint, 1, frozenset({0}), PartitionOptions())
    assert free[position].num_bytes == 0


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """On stdout are the results of commands; HiGHS prints if it has to repair a solution, here of a
    program in which only some columns are integral."""
    rng, sizes = random.Random(7), (0, 8, 16, 24, 64, 96, 128, 160, 200, 512, 1024)

    def below(end: int) -> int:
        return int(rng.random() * end)

    values = [
        ForwardValue(
            parents=tuple({below(index) for _ in range(below(3)) if index}),
            num_bytes=sizes[below(len(sizes))],
            time_us=30 * rng.random(),
            needed=rng.random() < 0.6,
            can_keep=rng.random() < 0.9,
            can_repeat=rng.random() < 0.9,
        )
        for index in range(60)
    ]
    limit_bytes = sum(value.num_bytes for value in values) // 4
    found = SavingProgram(values).solve(limit_bytes)
    assert found is not None
    assert found.num_bytes <= limit_bytes
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("missing_bytes", [1, 1024])
def test_a_limit_holds_to_the_byte_beside_gigabytes(missing_bytes: int) -> None:
    sizes = [1, 3, 1023, 10**9 + 1, 3 * 10**9]
    values = [ForwardValue((), size, 1.0, needed=True) for size in sizes]
    limit = sum(sizes) - missing_bytes
    choice = SavingProgram(values).solve(limit)
    assert choice is not None
    assert choice.num_bytes <= limit
    assert choice.time_us <= 2.0
    smallest = SavingProgram(values).solve(4)
    assert smallest is not None
    assert smallest.kept == {0, 1}
