"""What holds for each of our operators: how torch, the communicator and the context know it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ops.communicator import Communicator, current_communicator, running_on
from sp_compiler.ops.registry import OPERATORS, operator_of

_ONE = Communicator(None, 0, 1)
_SEED = torch.tensor(5)
_IDS = torch.tensor([1, 0, 2])
sp = torch.ops.sp_compiler


def _rows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()


_CALLS: dict[str, tuple[Any, ...]] = {
    "convert": (_rows(), "I", "R", 1),
    "wait": (_rows().detach(), 1),
    "pad_rows": (_rows(), 1),
    "pad_rows_with_zeros": (_rows().detach(), 1),
    "cut_rows": (_rows(), 3, 1),
    "vocab_embedding": (_rows(), _IDS, 3, 1),
    "vocab_embedding_backward": (_rows().detach(), _IDS, 3, 1),
    "vocab_nll": (_rows(), _IDS, -100, 4, 1),
    "vocab_nll_backward": (
        *(torch.ones(3).double(), _rows().detach(), _IDS),
        *(_rows().detach().logsumexp(-1), -100, 4, 1),
    ),
    "dropout": (_rows(), _SEED, 0.5, 0, 0, 1),
    "dropout_mask": (_rows(), _SEED, 0.5, 0, 0, 1),
}


def test_every_operator_has_a_call() -> None:
    assert _CALLS.keys() == OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_finds_schema_fake_and_gradient_consistent(name: str) -> None:
    with running_on(_ONE):
        torch.library.opcheck(OPERATORS[name].overload, _CALLS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_without_a_communicator_it_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"sp_compiler::{name} depends on the rank"):
        OPERATORS[name].overload(*_CALLS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_record_method_and_target_are_one_operator(name: str) -> None:
    operator = OPERATORS[name]
    assert operator_of(operator.overload) is operator
    assert getattr(Communicator, name) is operator.kernel
    last = operator.overload._schema.arguments[-1]
    assert last.name == "world_size"
    given = operator.method_arguments(_CALLS[name])
    assert len(given) == len(_CALLS[name]) - (not operator.takes_world_size)


@pytest.mark.parametrize("target", ["placeholder", torch.relu, torch.ops.aten.relu.default])
def test_no_other_target_has_a_record(target: object) -> None:
    assert operator_of(target) is None


@pytest.mark.parametrize("name", ["convert", "wait", "pad_rows", "cut_rows"])
def test_results_share_nothing_with_arguments(name: str) -> None:
    """Though the kernels return the argument itself, as the generated code may have it."""
    x = _CALLS[name][0]
    with running_on(_ONE):
        result = OPERATORS[name].overload(*_CALLS[name])
    assert torch.equal(result, x)
    assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    kernel_result = getattr(_ONE, name)(*OPERATORS[name].method_arguments(_CALLS[name]))
    assert kernel_result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


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
    x = _rows()
    with running_on(_ONE):
        y = sp.dropout(x, _SEED, 0.5, 0, 0, 1)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with running_on(Communicator(None, 1, 2)):
        (under_another,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), x)))
    thread.start()
    thread.join()
    assert torch.equal(expected, y.detach() / x.detach())
    assert torch.equal(under_another, expected)
    assert torch.equal(found[0], expected)
