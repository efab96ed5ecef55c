"""Memory and communication of running code, as seen from its operators."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_compiler.runtime.parameter_gradients import local_tensor

_COLLECTIVES = {
    "all_gather_into_tensor": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "allreduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}

# A thread of gloo holds a collective's tensors until a moment after the wait for it returned.
_GLOO_LETS_GO_S = 0.2


class Recorder(TorchDispatchMode):
    """Mode that counts collectives and remembers every storage that an operator returns.

    Pinned memory is not counted: it holds copies of the device's tensors on the host.

    Attributes:
        collectives: number of collectives, by kind.
        wire_bytes: bytes of the full tensors that they handled, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.wire_bytes: Counter[str] = Counter()
        self._made: list[tuple[StorageWeakRef, int, int]] = []
        self._alive: dict[int, int] = {}
        self._left_out: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs its local operators through here again
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in {"_c10d_functional", "c10d"} and name in _COLLECTIVES:
            kind = _COLLECTIVES[name]
            self.collectives[kind] += 1
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.wire_bytes[kind] += max(tensor.nbytes for tensor in tensors)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._remember(leaf)
        return result

    def alive_bytes(self, *, excluding: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that still exist, once each, without ``excluding``."""
        if self.collectives:
            time.sleep(_GLOO_LETS_GO_S)
        return self._bytes(self._now(), self._numbers(excluding))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of ``tensors``, which must exist."""
        self._left_out |= self._numbers(tensors)

    def _remember(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type == "meta":
            return  # fake, or a wrapper of a tensor that was seen already
        if tensor.is_pinned():
            return
        storage = tensor.untyped_storage()
        known = self._alive.get(storage.data_ptr())
        if known is None or self._made[known][0].expired():
            self._alive[storage.data_ptr()] = len(self._made)
            self._made.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))

    def _now(self) -> list[int]:
        """Return the indices of the storages that exist."""
        self._alive = {
            pointer: number
            for pointer, number in self._alive.items()
            if not self._made[number][0].expired()
        }
        return list(self._alive.values())

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the indices of the storages of ``tensors`` that exist."""
        pointers = {local_tensor(tensor).untyped_storage().data_ptr() for tensor in tensors}
        return {number for number in self._now() if self._made[number][1] in pointers}

    def _bytes(self, numbers: Iterable[int], left_out: set[int]) -> int:
        left_out = left_out | self._left_out
        return sum(self._made[number][2] for number in numbers if number not in left_out)
