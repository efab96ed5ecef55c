"""Groups that compute on an accelerator: no tensor of the CPU is sent, and the host never waits.

"meta" is the accelerator here. Like a GPU it does not mix with the CPU in one operator, and reading
a number off it, which would wait, raises.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compiler.base.errors import ArgumentError
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.group import TensorParallelGroup, broadcast, forward_seed, watched_group
from sp_compiler.runtime.rank_checks import RankAgreement, _Kind

DEVICE = "meta"


class _Copies(TorchDispatchMode):
    """Refuses copies from the CPU to the device: the host waits for them behind all kernels."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, result) if isinstance(value, Tensor)]
        assert len({tensor.device for tensor in tensors}) <= 1, func
        return result


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    tensors: list[Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **_: tensors.append(tensor))
    return tensors


def _group(communicator: Any = None) -> TensorParallelGroup:
    mesh: Any = SimpleNamespace(device_type=DEVICE, get_group=object)
    return TensorParallelGroup(mesh, communicator or Communicator(None, 0, 2))


def test_the_seed_of_a_forward(sent: list[Tensor]) -> None:
    with _Copies():
        seed = forward_seed(_group(), torch.device(DEVICE))
    assert (seed.dtype, seed.shape, seed.device.type) == (torch.int64, (), DEVICE)
    assert [tensor.device.type for tensor in sent] == [DEVICE]


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_weights_of_rank_0_wherever_they_are(device: str, sent: list[Tensor]) -> None:
    """Offloaded ones are on the CPU, where NCCL has no collectives."""
    if device == "cpu":  # "meta" has no numbers to bring back
        with pytest.raises(NotImplementedError, match="meta"):
            broadcast(torch.ones(2, 3).mT, _group())
    else:
        broadcast(torch.ones(2, 3, device=device).mT, _group())
    assert [(tensor.device.type, tensor.is_contiguous()) for tensor in sent] == [(DEVICE, True)]


def test_numbers_of_inputs_are_gathered_on_the_device() -> None:
    """Also numbers of inputs on the CPU, such as lengths."""
    gathered: list[Tensor] = []

    class _Sent(Exception):
        pass

    def all_gather(own: Tensor, *_: str) -> Tensor:
        gathered.append(own)
        raise _Sent

    agreement = RankAgreement(_group(SimpleNamespace(all_gather=all_gather)), "module")
    values = [torch.tensor(5), torch.tensor(7, device=DEVICE)]
    with _Copies(), pytest.raises(_Sent):
        agreement._gather_on_device(_Kind(3), values, dict)
    assert [tensor.device.type for tensor in gathered] == [DEVICE]


def test_gloo_is_refused_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would crash: no error, and no rank that could tell."""
    gloo = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: "gloo"))
    axis: Any = SimpleNamespace(device_type="cuda", get_group=lambda: gloo, size=lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    with pytest.raises(ArgumentError, match=r'sends tensors of "cuda" through gloo.*"nccl"'):
        watched_group(axis, timedelta(seconds=1))
