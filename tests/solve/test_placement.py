"""The placement solver against brute force on random small problems."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.base.placement import I, P, Placement, R, S
from sp_compiler.solve import elimination, placement, placement_milp
from sp_compiler.solve.elimination import Elimination
from sp_compiler.solve.placement import cost_of, solve
from sp_compiler.solve.placement_milp import solve_integer_program
from sp_compiler.solve.placement_problem import Option, Vertex

PLACEMENTS = (R, I, P, S(0), S(1))
Costs = dict[tuple[Any, Placement, Placement], float]


def brute_force(vertices: list[Vertex], costs: Costs) -> float | None:
    best: float | None = None
    for choice in itertools.product(*(range(len(vertex.options)) for vertex in vertices)):
        chosen = [vertex.options[i] for vertex, i in zip(vertices, choice, strict=True)]
        made = {
            value: placement
            for vertex, option in zip(vertices, chosen, strict=True)
            for value, placement in zip(vertex.makes, option.makes, strict=True)
        }
        needed = {
            (value, placement)
            for vertex, option in zip(vertices, chosen, strict=True)
            for value, placement in zip(vertex.needs, option.needs, strict=True)
            if made[value] != placement
        }
        prices = [costs.get((value, made[value], target)) for value, target in needed]
        if None in prices:
            continue
        total = sum(option.cost_us for option in chosen) + sum(p for p in prices if p is not None)
        best = total if best is None else min(best, total)
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Vertex], Costs]:
    """Up to six vertices that make up to two values each, with cycles and repeated operands.

    Costs are small integers, so that many choices tie; some conversions are impossible.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 6))
    cyclic, possible = draw(st.booleans()), draw(st.sampled_from([0.5, 0.8, 1.0]))
    made = [[f"v{n}.{k}" for k in range(rng.randint(0, 2))] for n in range(count)]
    vertices = []
    for number in range(count):
        others = made[:number] + (made[number + 1 :] if cyclic else [])
        sources = [value for values in others for value in values]
        needs = rng.choices(sources, k=rng.randint(0, 3)) if sources else []
        options = [
            Option(
                tuple(rng.choice(PLACEMENTS) for _ in needs),
                tuple(rng.choice(PLACEMENTS) for _ in made[number]),
                float(rng.randint(0, 12)),
            )
            for _ in range(rng.randint(1, 5))
        ]
        vertices.append(Vertex(tuple(needs), tuple(made[number]), options))
    costs = {
        (value, a, b): float(rng.randint(0, 9))
        for values in made
        for value in values
        for a, b in itertools.permutations(PLACEMENTS, 2)
        if rng.random() < possible
    }
    return vertices, costs


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_objective_equals_brute_force(problem: tuple[list[Vertex], Costs]) -> None:
    vertices, costs = problem

    def conversion_cost(value: Any, source: Placement, target: Placement) -> float | None:
        return costs.get((value, source, target))

    expected = brute_force(vertices, costs)
    if expected is None:
        with pytest.raises(SPCompilerError, match="no placement satisfies"):
            solve(vertices, conversion_cost)
        with pytest.raises(ValueError, match=r"."):
            solve_integer_program(vertices, conversion_cost)
        return
    choices = Elimination(vertices, conversion_cost).run()
    assert choices is not None
    program, gap = solve_integer_program(vertices, conversion_cost)
    assert gap == 0
    bounded = Elimination(vertices, conversion_cost, most_us=expected + 1e-3).run()
    assert bounded is not None
    for found in (choices, program, bounded):
        assert cost_of(vertices, found, conversion_cost) == pytest.approx(expected, abs=1e-3)
    assert solve(vertices, conversion_cost).cost_us == pytest.approx(expected, abs=1e-3)


def _long_chain(length: int) -> tuple[list[Vertex], Costs]:
    """Each vertex reads the last value and the one before, as residual connections do."""
    rng = random.Random(length)
    vertices, costs = [], {}
    for n in range(length):
        needs = tuple(f"v{m}" for m in (n - 1, n - 2) if m >= 0)
        options = [
            Option(tuple(rng.choices(PLACEMENTS, k=len(needs))), (p,), float(rng.randint(0, 12)))
            for p in PLACEMENTS
        ]
        vertices.append(Vertex(needs, (f"v{n}",), options))
        for a, b in itertools.permutations(PLACEMENTS, 2):
            costs[f"v{n}", a, b] = float(rng.randint(1, 9))
    return vertices, costs


def test_tables_that_grow_too_wide_are_left_to_the_integer_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vertices, costs = _long_chain(8)
    expected = solve(vertices, lambda *key: costs[key]).cost_us
    monkeypatch.setattr(elimination, "MAX_PAIRS", 20)
    assert Elimination(vertices, lambda *key: costs[key]).run() is None
    assert solve(vertices, lambda *key: costs[key]).cost_us == pytest.approx(expected, abs=1e-3)


def test_a_rough_choice_bounds_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    vertices, costs = _wide(7)

    def conversion_cost(*key: Any) -> float:
        return costs[key]

    expected, _ = solve_integer_program(vertices, conversion_cost)
    monkeypatch.setattr(elimination, "MAX_PAIRS", 100_000)
    monkeypatch.setattr(placement, "solve_integer_program", None)
    assert Elimination(vertices, conversion_cost).run() is None
    found = solve(vertices, conversion_cost)
    assert found.choices == expected
    assert not found.is_eliminated


def _wide(length: int) -> tuple[list[Vertex], Costs]:
    """Each vertex reads all that were made before."""
    rng = random.Random(length)
    vertices, costs = [], {}
    for n in range(length):
        needs = tuple(f"v{m}" for m in range(n))
        options = [
            Option(tuple(rng.choices(PLACEMENTS, k=n)), (p,), rng.uniform(0, 12))
            for p in PLACEMENTS * 6
        ]
        vertices.append(Vertex(needs, (f"v{n}",), options))
        for a, b in itertools.permutations(PLACEMENTS, 2):
            costs[f"v{n}", a, b] = rng.uniform(1, 9)
    return vertices, costs


def test_a_vertex_may_read_what_it_makes() -> None:
    vertices = [Vertex(("x",), ("x",), [Option((R,), (S(0),), 1.0), Option((I,), (I,), 3.0)])]
    assert solve(vertices, lambda *_: 7.0).choices == [1]


def test_a_conversion_is_paid_once_for_all_its_consumers() -> None:
    reader = [Option((R,), (), 0.0)]
    vertices = [
        Vertex((), ("x",), [Option((), (S(0),), 0.0)]),
        Vertex(("x",), (), reader),
        Vertex(("x",), (), reader),
    ]
    assert solve(vertices, lambda *_: 7.0).cost_us == pytest.approx(7.0, abs=1e-3)


def test_the_first_of_equal_options_is_chosen() -> None:
    options = [Option((), (placement,), 1.0) for placement in PLACEMENTS]
    assert solve([Vertex((), ("x",), options)], lambda *_: None).choices == [0]


@pytest.mark.slow
def test_both_ways_agree_on_a_long_chain_and_a_search_that_is_cut_short_says_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vertices, costs = _long_chain(20)
    choices = Elimination(vertices, lambda *key: costs[key]).run()
    assert choices is not None
    best = solve(vertices, lambda *key: costs[key])
    assert best.choices == choices
    monkeypatch.setattr(elimination, "MAX_PAIRS", 20)
    program = solve(vertices, lambda *key: costs[key])
    assert program.gap == 0
    assert program.cost_us == pytest.approx(best.cost_us, abs=1e-3)
    monkeypatch.setattr(placement_milp, "_MAX_COLUMNS", 1)
    found = solve(vertices, lambda *key: costs[key])
    assert 0 < found.gap < 0.1
    assert best.cost_us * (1 - 1e-6) <= found.cost_us <= best.cost_us / (1 - found.gap) + 1e-3
