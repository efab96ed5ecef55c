"""A budget for the whole device: what a step may take, and the words where it is too little."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import sp_compiler
from sp_compiler import ArgumentError, Plan
from sp_compiler.base.units import parse_bytes
from sp_compiler.options import CompileOptions
from tests.helpers.users import batch, compiled, net
from tests.models import zoo


def _plan(layers: int = 1, **options: Any) -> Plan:
    model = zoo.build("plain", layers=layers)
    return sp_compiler.plan(model, ((), zoo.inputs("plain")), tp=2, **options)


def _refused(**options: Any) -> str:
    with pytest.raises(ArgumentError, match="device_memory=") as error:
        _plan(**options)
    return str(error.value)


@pytest.mark.slow
def test_auto_fills_what_the_state_leaves() -> None:
    most = _plan(recompute="none")
    state_bytes = most.total_bytes - most.activation_peak_bytes
    said = _refused(device_memory=state_bytes + 1, recompute="auto")
    assert "are parameters, gradients and AdamW's moments" in said
    # The minimum that it names fits, to the byte, and the rest of the plan agrees with the limit.
    least = int(re.findall(r"that fits is (\d+)", said)[0])
    smallest = _plan(device_memory=least, recompute="auto")
    assert smallest.total_bytes == least
    assert "Device memory of" in str(smallest)
    assert "100.0 % used" in str(smallest)
    rounded = re.findall(r'"(.*?)"', said)[0]
    assert least <= parse_bytes("device_memory", rounded)
    # The same program as with the activations' share of it.
    budget = least - state_bytes
    assert _plan(memory_budget=budget, recompute="auto").blocks == smallest.blocks
    largest = _plan(device_memory=2 * most.total_bytes, recompute="auto")
    assert largest.step_us <= smallest.step_us
    assert any("larger memory budget" in note for note in largest.notes)
    assert not any("larger memory budget" in note for note in smallest.notes)


@pytest.mark.slow
def test_what_overlap_takes_fits_as_well() -> None:
    """Above the peak without overlap only where the device has room for it."""
    # In one layer alone there is less to hide.
    blocking, free = _plan(2, overlap=False), _plan(2)
    same, little = (
        _plan(2, device_memory=blocking.total_bytes + more_bytes) for more_bytes in (0, 2048)
    )
    assert same.total_bytes <= blocking.total_bytes < little.total_bytes
    assert little.total_bytes <= blocking.total_bytes + 2048 < free.total_bytes
    assert free.step_us < little.step_us < same.step_us < blocking.step_us


@pytest.mark.slow
def test_what_does_not_fit_and_by_how_much() -> None:
    full = _plan(overlap=False)
    said = _refused(device_memory=full.total_bytes - 1024, overlap=False)
    assert "1.00 KiB more: parameters" in said
    assert said.endswith(
        'Use recompute="auto", which fits activations into what is left; recompute="full"; '
        "a smaller batch; or more tensor-parallel ranks"
    )
    assert _plan(device_memory=full.total_bytes, overlap=False).total_bytes == full.total_bytes
    for recompute in ("auto", "full"):
        said = _refused(device_memory=1024, recompute=recompute)
        assert "dp_shard" in said, "no way to recompute makes parameters smaller"
    assert "Recomputation cannot reduce " in said


@pytest.mark.slow
def test_what_helps_where_everything_is_recomputed_already() -> None:
    full = _plan(recompute="full", overlap=False)
    said = _refused(device_memory=full.total_bytes - 1024, recompute="full", overlap=False)
    assert 'recompute="full"' not in said
    assert 'Use recompute="auto", ' in said
    assert "a smaller batch" in said


def test_a_model_that_does_not_fit_is_given_back() -> None:
    model = net()
    example_inputs: Any = ((batch(),), {})
    with pytest.raises(ArgumentError, match="a step needs"):
        compiled(lambda: model, device_memory=100, example_inputs=example_inputs)
    compiled(lambda: model, device_memory="1GiB", example_inputs=example_inputs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_memory": "1GiB", "memory_budget": "1GiB"}, "pass only one of them"),
        ({"device_memory": "80GB"}, "1024-based"),
        ({"device_memory": 0}, "positive"),
    ],
)
def test_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        CompileOptions(recompute="auto", **options)


def test_where_it_has_no_meaning() -> None:
    grid = {"mesh": {"tp": 2, "dp_shard": 2}, "microbatches": 2}
    with pytest.raises(ArgumentError, match="suggest"):
        sp_compiler.plan(nn.Linear(2, 2), ((batch(),), {}), device_memory="1GiB", **grid)  # type: ignore[call-overload]
