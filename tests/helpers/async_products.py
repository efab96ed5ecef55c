"""Asynchronous products in models that are too small for them to pay."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx import Graph

from sp_compiler.ir.op_traits import collective_of
from sp_compiler.passes import async_tp


def let_all_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every collective of a forward that can be part of a product be part of it."""
    monkeypatch.setattr(async_tp, "LEAST_ROWS", 1)
    monkeypatch.setattr(async_tp, "elapsed_us", _number_of_collectives)


def _number_of_collectives(graph: Graph, *_: Any) -> int:
    return sum(collective_of(node) is not None for node in graph.nodes)
