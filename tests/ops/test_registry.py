"""The registry, and the communicator that our operators find in their context."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sp_compiler.ops.communicator import Communicator, current_communicator, running_on
from sp_compiler.ops.dropout import DROPOUT
from sp_compiler.ops.registry import OPERATORS, operator_of

_ONE = Communicator(None, 0, 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_tested_in_the_file_of_its_module(name: str) -> None:
    module = OPERATORS[name].kernel.__module__.rpartition(".")[2]
    tests = Path(__file__).with_name(f"test_{module}.py").read_text(encoding="utf-8")
    assert re.search(rf"\b{name.upper()}\b", tests)


@pytest.mark.parametrize("target", ["placeholder", torch.relu, torch.ops.aten.relu.default])
def test_no_other_target_has_a_record(target: object) -> None:
    assert operator_of(target) is None


def test_the_innermost_communicator_counts() -> None:
    other = Communicator(None, 1, 2)
    assert current_communicator() is None
    with running_on(_ONE):
        with running_on(other):
            assert current_communicator() is other
        assert current_communicator() is _ONE
    assert current_communicator() is None


def test_backward_runs_where_forward_ran() -> None:
    """After the context has been left, under another one, and in a thread that has none."""
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(5)
    with running_on(_ONE):
        y = DROPOUT.overload(x, seed, 0.5, 0, 0, 1)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with running_on(Communicator(None, 1, 2)):
        (under_another,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), x)))
    thread.start()
    thread.join()
    assert torch.equal(expected, y.detach())
    assert torch.equal(under_another, expected)
    assert torch.equal(found[0], expected)
