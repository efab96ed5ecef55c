"""The page of ``torch.compile`` with this backend is current, and what it shows is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import backend


def test_page_is_current_and_no_run_is_wrong() -> None:
    results = json.loads(backend.FILE.read_text())
    assert backend.PAGE.read_text() == backend.page(results)
    for name, records in results["architectures"].items():
        for tp, fields in records.items():
            assert backend.Record(**fields).passes, f"{name} on {tp}"


@pytest.mark.parametrize(
    "change", [{"gradient_error": 1e-8}, {"recompiled": 1}, {"backend_bytes": 9}]
)
def test_a_wrong_run_does_not_pass(change: dict[str, float]) -> None:
    fields: dict[str, Any] = {
        "gradient_error": 1e-15, "as_written_error": 1e-7, "eager_bytes": 20, "backend_bytes": 8,
        "copied_bytes": 0, "compile_bytes": 8, "graphs": 1, "recompiled": 0,
    }  # fmt: skip
    assert backend.Record(**fields).passes
    assert not backend.Record(**{**fields, **change}).passes
