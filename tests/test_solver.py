"""The placement solver against brute force on random small problems."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from sp_compiler.errors import SPCompilerError
from sp_compiler.placement import I, P, Placement, R, S
from sp_compiler.solver import Option, Vertex, solve

PLACEMENTS = (R, I, P, S(0), S(1))


def random_chain(
    seed: int,
) -> tuple[list[Vertex], dict[tuple[Any, Placement, Placement], float]]:
    """A random DAG of up to six vertices; some conversions are impossible."""
    rng = random.Random(seed)
    vertices: list[Vertex] = []
    for number in range(rng.randint(2, 6)):
        sources = rng.sample(range(number), min(number, rng.randint(0, 2)))
        options = [
            Option(
                tuple(rng.choice(PLACEMENTS) for _ in sources),
                (rng.choice(PLACEMENTS),),
                float(rng.randint(0, 20)),
            )
            for _ in range(rng.randint(1, 4))
        ]
        vertices.append(Vertex(tuple(f"v{s}" for s in sources), (f"v{number}",), options))
    costs = {
        (f"v{number}", a, b): float(rng.randint(1, 15))
        for number in range(len(vertices))
        for a, b in itertools.permutations(PLACEMENTS, 2)
        if rng.random() < 0.8
    }
    return vertices, costs


def brute_force(
    vertices: list[Vertex], costs: dict[tuple[Any, Placement, Placement], float]
) -> float | None:
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


@pytest.mark.parametrize("seed", range(60))
def test_objective_equals_brute_force(seed: int) -> None:
    vertices, costs = random_chain(seed)
    expected = brute_force(vertices, costs)
    if expected is None:
        with pytest.raises(SPCompilerError, match="no placement satisfies"):
            solve(vertices, lambda value, a, b: costs.get((value, a, b)))
        return
    found = solve(vertices, lambda value, a, b: costs.get((value, a, b)))
    assert found.cost_us == pytest.approx(expected, abs=1e-3)


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
