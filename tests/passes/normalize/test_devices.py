"""Numbers on the CPU that are written into tensors on a device.

"meta" is the device here: like a GPU it does not mix with the CPU, but for single numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sp_compiler.ir.captured import Captured
from sp_compiler.passes.normalize import normalize
from tests.helpers.normalized import body, captured_from, randn


def _normalized_on_device(function: Callable[[Tensor], Tensor]) -> Captured:
    """All but what the model computes of Python's numbers alone is on the device."""
    captured = captured_from(function, randn(2, 3))
    graph = captured.module.graph
    kinds = dict(zip(graph.find_nodes(op="placeholder"), captured.refs, strict=True))
    for node in graph.nodes:
        operands = [operand.meta["val"] for operand in node.all_input_nodes]
        is_number = (
            kinds[node].kind == "constant"
            if node in kinds
            else not operands or all(operand.device.type == "cpu" for operand in operands)
        )
        if node.op != "output" and not is_number:
            node.meta["val"] = node.meta["val"].to("meta")
    normalize(captured)
    return captured


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 3.0
    return y


def test_a_number_that_is_written_moves_once_and_not_in_every_step() -> None:
    captured = _normalized_on_device(_written)
    (constant,) = captured.constants.values()
    assert constant.device.type == "meta"
    assert {
        node.meta["val"].device.type for node in captured.module.graph.nodes if node.op != "output"
    } == {"meta"}
    assert "_to_copy" not in "\n".join(body(captured))


def test_a_number_that_the_cpu_needs_as_well_stays_there() -> None:
    def function(x: Tensor) -> Tensor:
        number = torch.tensor(3.0)
        y = x.clone()
        y[:, 0] = number
        return y * number

    captured = _normalized_on_device(function)
    (constant,) = captured.constants.values()
    assert constant.device.type == "cpu"
    assert [line for line in body(captured) if "_to_copy" in line and "device=" in line]


def test_a_type_is_taken_with_its_device() -> None:
    captured = _normalized_on_device(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).type_as(x))
    (constant,) = captured.constants.values()
    assert (constant.device.type, constant.dtype) == ("meta", torch.float32)
    assert "_to_copy(%0, dtype=torch.float64)" in "\n".join(body(captured))
    before = body(captured)
    normalize(captured)
    assert body(captured) == before


def test_a_tensor_of_the_model_stays_where_it_is() -> None:
    """Moved, it would not see what is written into it later."""
    table = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    captured = _normalized_on_device(lambda x: x * table.type_as(x))
    (constant,) = captured.constants.values()
    assert constant.device.type == "cpu"
    assert [line for line in body(captured) if "_to_copy" in line and "device=" in line]


def test_a_copy_of_the_captured_model_keeps_its_numbers() -> None:
    captured = captured_from(_written, randn(2, 3))
    other = captured.copy()
    before = dict(other.constants)
    normalize(captured)
    assert other.constants == before


def test_on_one_device_nothing_is_moved() -> None:
    captured = captured_from(_written, randn(2, 3))
    normalize(captured)
    assert "_to_copy" not in "\n".join(body(captured))
