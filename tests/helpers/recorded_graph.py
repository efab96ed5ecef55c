"""A stand-in for CUDA graphs on the CPU that is as strict as they are.

It writes down the operators that run, and runs them again on the very same memory. What nobody but
the graphs holds is garbage after a backward, as in the memory pool of CUDA graphs; and a number
that the host reads cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_compiler.runtime.cuda_graphs import device_graph


class Pool:
    """Memory of a forward and its backward.

    Attributes:
        made: all tensors that operators have made while they were recorded.
        kept: what the functions returned, which their callers may read.
        replays: how often either was replayed.
    """

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.replays = 0

    def spoil(self) -> None:
        """Overwrite all that is not kept."""
        kept = {x.untyped_storage().data_ptr() for x in self.kept}
        for value in self.made:
            if value.untyped_storage().data_ptr() not in kept and value.is_floating_point():
                value.fill_(torch.nan)


class RecordedGraph(TorchDispatchMode):
    """In place of :class:`sp_compiler.runtime.cuda_graphs.device_graph.DeviceGraph`."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._is_backward = bool(pool.kept)
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def record(self, function: Callable[[], Any]) -> Any:
        self._is_backward = bool(self._pool.kept)
        with self:
            result = function()
        self._pool.kept += [x.detach() for x in _tensors(result)]
        if self._is_backward:
            self._pool.spoil()
        # Recorded, not run: no numbers in what was made, which is as it was for autograd.
        made = {x.untyped_storage().data_ptr() for x in self._pool.made}
        for value in _tensors(result):
            if value.is_floating_point() and value.untyped_storage().data_ptr() in made:
                with torch.autograd._unsafe_preserve_version_counter(value):
                    value.detach().fill_(torch.nan)
        return result

    def replay(self) -> None:
        self._pool.replays += 1
        with torch.no_grad():
            for func, args, kwargs, made in self._calls:
                for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    if func.namespace == "_c10d_functional":
                        torch.ops._c10d_functional.wait_tensor(new)  # else copied too early
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)
            if self._is_backward:
                self._pool.spoil()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # operators on its part come next
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        if any(isinstance(x, FakeTensor) for x in made):
            return result  # DTensor looks for the placement of a result
        self._calls.append((func, args, kwargs or {}, made))
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        self._pool.made += [x for x in made if x.untyped_storage().data_ptr() not in given]
        return result


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Record steps on the CPU; return the pools of those that are recorded from now on."""
    pools: list[Pool] = []

    def memory_pool() -> Pool:
        pools.append(Pool())
        return pools[-1]

    monkeypatch.setattr(device_graph, "can_record", lambda device: True)
    monkeypatch.setattr(device_graph, "is_recording", lambda: False)
    monkeypatch.setattr(device_graph, "memory_pool", memory_pool)
    monkeypatch.setattr(device_graph, "DeviceGraph", RecordedGraph)
    return pools


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
