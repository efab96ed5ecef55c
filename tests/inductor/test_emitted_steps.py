"""Whole steps in the Triton code that Inductor emits for a GPU, interpreted, against eager code."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.helpers.interpreted_triton import Run, needs_triton

if TYPE_CHECKING:
    from benchmarks.inductor import Record

pytestmark = [needs_triton, pytest.mark.slow]


def _step(name: str, tp: int) -> Record:
    # Here, for where they are imported Triton has read whether to interpret.
    from benchmarks import inductor, interpreted_triton
    from tests.models import architecture

    # A second layer would run the same kernels again, line by line.
    with mock.patch.object(architecture, "LAYERS", 1):
        found, exact = inductor.case(name)
    emitted = interpreted_triton.compile_graph
    with mock.patch("sp_compiler.inductor.fused.compile_graph", emitted):
        return inductor.measure(found, exact, tp)


@pytest.mark.parametrize(("name", "tp"), [("mixtral", 1), ("llama", 2)])
def test_numbers_and_masks_of_eager_code(interpreted: Run, name: str, tp: int) -> None:
    record = interpreted(_step, name, tp)
    assert record.passes, record
    assert record.functions > 3
    assert not record.as_written
    assert record.masked > 1000
    assert not record.masks_differ
