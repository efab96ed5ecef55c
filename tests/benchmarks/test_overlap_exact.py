"""Orders that run in a step are about as short as those of an exact program."""

from __future__ import annotations

import pytest

from benchmarks.overlap import SHARES, block_of, compiled, with_communication
from benchmarks.overlap_exact import gaps, longer_than_joint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT", "Mixtral"])
def test_orders_of_steps_are_within_two_percent_of_the_shortest(name: str) -> None:
    """On the slowest link, where neither reaches the bound that costs no search."""
    parts = block_of(compiled(name, recompute="none", overlap=False)).partitioned
    assert parts.backward is not None
    device = with_communication(SHARES[-1], [parts.forward, parts.backward])
    kind, gap = next(gaps(name, "none", device, seconds=60))
    assert kind == "in a step"
    assert gap.proven
    assert gap.longer < 0.02
    assert longer_than_joint(name, "none", device) < 0.02
