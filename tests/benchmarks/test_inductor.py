"""The page of Inductor's numbers, and what finds a wrong one."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import inductor


def test_page_is_current() -> None:
    assert inductor.PAGE.read_text() == inductor.page(json.loads(inductor.FILE.read_text()))


def test_one_element_of_a_mask_is_found() -> None:
    """However little it matters to the gradients."""
    true = torch.rand(4, 50) + 1
    true[torch.rand(4, 50) < 0.2] = 0
    true[0, 0] = 1e-6
    wrong = true.clone()
    wrong[0, 0] = 0
    functions = inductor._Functions()
    functions._compare(true.clone(), true, draws=True, scale=2.0)
    assert (functions.masked, functions.masks_differ, functions.error) == (200, 0, 0.0)
    functions._compare(wrong, true, draws=True, scale=2.0)
    assert functions.masks_differ == 1
    assert 0 < functions.error < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_result_that_is_no_number_is_no_small_error(value: float | None) -> None:
    result = None if value is None else torch.tensor([1.0, value])
    assert inductor._error([result], [torch.ones(2)]) == float("inf")
