"""Weights that ranks start with: what is asked of the others, and what is taken from the first."""

from __future__ import annotations

import torch

from sp_compiler.grid.initial_weights import agree_on_weights


def test_numbers_are_compared_or_taken_from_the_first_rank() -> None:
    asked: list[tuple[str, dict[str, str]]] = []
    weights = {"w": torch.zeros(2), "unread": torch.zeros(2, device="meta")}

    def agreed(*, broadcasts: bool) -> list[str]:
        agree_on_weights(
            weights,
            lambda purpose, facts: asked.append((purpose, dict(facts))),
            lambda value: value.fill_(3),
            broadcasts=broadcasts,
        )
        purpose, facts = asked.pop()
        return [purpose, *facts.values()]

    before = agreed(broadcasts=False)
    assert torch.equal(weights["w"], torch.zeros(2))
    # Of shapes alone, which must be equal before a broadcast.
    shapes = agreed(broadcasts=True)
    assert torch.equal(weights["w"], torch.full((2,), 3.0))
    assert agreed(broadcasts=True) == shapes
    assert agreed(broadcasts=False) != before
