"""Mode in which operators advance a clock by their estimated time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_compiler.cost.hardware import kernel_us
from sp_compiler.cost.node_cost import operator_flops, tensor_bytes
from sp_compiler.emulation.clock import VirtualClock

# They run no kernel: memory is allocated without being written.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class OperatorTimes(TorchDispatchMode):
    """Runs every operator unchanged and advances ``clock`` by its roofline time.

    Collectives take time on the link; views and allocations take none.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # These unwrap themselves first and dispatch again on the tensors inside.
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Fake and functional tensors belong to the compilation, which is not part of a step.
        if types:
            return result
        if func.namespace == "aten" and func.overloadpacket.__name__ not in _ALLOCATIONS:
            self._clock.advance(self._time_us(func, args, kwargs, result))
        return result

    def _time_us(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> float:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # By memory, not by name: a reshape is a view or a copy, depending on strides. An in-place
        # operator returns its operand's memory too, but runs a kernel.
        owned = {value.untyped_storage()._cdata for value in operands}
        is_view = all(value.untyped_storage()._cdata in owned for value in results)
        if is_view and not func._schema.is_mutable:
            return 0.0
        num_bytes = sum(map(tensor_bytes, operands)) + tensor_bytes(result)
        _, flops = operator_flops(func, args, kwargs, result)
        dtype = operands[0].dtype if operands else torch.float32
        return kernel_us(flops, num_bytes, dtype, self._clock.hardware)
