"""Ways to hand over gradients are compared as tasks: those of the graphs that they would be."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest

from benchmarks import overlap
from sp_compiler import compiler
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.passes.overlap.hand_over import hand_over_of, movable_gradients
from sp_compiler.passes.overlap.orders import Unordered
from tests.helpers import parity
from tests.helpers.calls_in_a_row import INPUTS, SLOW, gpt
from tests.helpers.open_sizes import open_program
from tests.helpers.slow import slow


def _compare(parts: Partitioned, own_parameters: Collection[int], sizes: Sizes | None) -> int:
    """Compare for single gradients and pairs of them; return how many could be left."""
    assert parts.backward is not None
    alone = Unordered.of(parts.backward, own_parameters, sizes, SLOW)
    late = [frozenset({index}) for index in movable_gradients(parts, own_parameters)]
    pairs = [first | second for first, second in itertools.pairwise(late)]
    found = [moved for each in (*late, *pairs) if (moved := hand_over_of(parts, each)) is not None]
    for moved in found:
        graph = moved.split().both
        assert graph is not None
        expected = alone.with_graph(graph).tasks.block
        assert alone.search_of_calls(moved.calls()).block == expected
    return len(found)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("plain", "selective"),
        *(slow(name, "full") for name in ("open sizes", "gpt2", "encoder")),
    ],
)
def test_tasks_of_two_calls_are_those_of_their_graph(name: str, recompute: str) -> None:
    counts = []

    def compared(
        parts: Partitioned, own: Any, sizes: Any, *others: Any, in_a_row: bool, **costs: Any
    ) -> Partitioned:
        if in_a_row:
            counts.append(_compare(parts, own, sizes))
        return parts

    options = {"tp": 2, "recompute": recompute, "hardware": SLOW}
    with mock.patch.object(compiler, "overlap_collectives", compared):
        if name == "open sizes":
            open_program(gpt(), INPUTS, **options)
        else:
            parity.compiled(parity.case(name, 2, 12), **options)
    assert sum(counts) > 4


@pytest.mark.slow
def test_a_gpt_that_recomputes_nothing_exposes_no_more_than_it_must() -> None:
    """On the slowest link only the long search, of the gradient with the lowest bound, shows that
    leaving it to the layer before pays."""
    *_, slowest = found = [*overlap.rows("GPT", ("none",))]
    assert slowest.least > 0.1
    for row in found:
        assert row.exposed == pytest.approx(row.least, abs=1e-3), row.share
