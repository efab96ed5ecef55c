"""Inductor's compilation for a GPU that is not there, up to the text of its code.

No GPU and no Triton is needed: traced functions are lowered for fake CUDA tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from sp_compiler.inductor import lowering
from sp_compiler.inductor.lowering import Traced

T = TypeVar("T")
_DECOMPOSED = (torch.ops.aten._unsafe_masked_index_put_accumulate.default,)
_DEVICE = torch.device("cuda", 0)
# Of an H100; the text of kernels hardly depends on them.
_PROPERTIES = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=80 << 30,
    gcnArchName="",
)


def until_written(
    traced: Traced,
    look: Callable[[GraphLowering], T],
    compiled: Callable[[Traced], Any] = lowering.compile_graph,
) -> T:
    """Run Inductor's compilation of a traced function for a GPU until it would write its code;
    return the result of ``look`` at that point.

    Args:
        compiled: calls Inductor.
    """

    def stop(graph: GraphLowering) -> None:
        raise _WrittenError(look(graph))

    on_gpu = _on_gpu(traced)
    with mock.patch.object(GraphLowering, "compile_to_module", stop), _gpu_pretended():
        try:
            compiled(on_gpu)
        except Exception as error:  # Inductor wraps what is raised while it compiles
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, _WrittenError):
                cause = getattr(cause, "inner_exception", None) or cause.__context__
            if cause is None:
                raise
            return cause.found
    raise AssertionError("Inductor has compiled nothing")


class _WrittenError(Exception):
    """Ends the compilation of a function once its text is there."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def _on_gpu(traced: Traced) -> Traced:
    """The same graph with fake CUDA tensors."""
    mode = FakeTensorMode()
    storages: dict[int, tuple[Any, Tensor]] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        # Views stay views of one tensor: Inductor reads off them what may be written in place.
        if storage._cdata not in storages:
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_DEVICE)
            # With the storage itself, whose address would else be another's next.
            storages[storage._cdata] = storage, whole
        whole = storages[storage._cdata][1].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    # By hand: fake kernels of some operators ask a PyTorch without CUDA for its device.
    with mode:
        for module in traced.module.modules():  # of attention also the functions of its scores
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                if "device" in node.kwargs:
                    node.update_kwarg("device", _DEVICE)
                if "val" in node.meta:
                    node.meta["val"] = tree_map(moved, node.meta["val"])
        fakes = [moved(x) for x in traced.fakes]
    return dataclasses.replace(traced, mode=mode, fakes=fakes)


def _in_order_of(x: Tensor, strides: Sequence[int]) -> Tensor:
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    ordered = x.new_empty([x.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(x.dim())])


@contextlib.contextmanager
def _gpu_pretended() -> Iterator[None]:
    """Context in which Inductor finds a GPU and Triton. It queries properties but calls neither."""
    facts: Mapping[str, Callable[..., Any]] = {
        "torch.cuda.get_device_properties": lambda device=None: _PROPERTIES,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch.cuda.current_device": lambda: 0,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        "torch._inductor.scheduler.has_triton": lambda: True,
        # Patterns that it would trace with tensors of the GPU; nothing here has any.
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda device: None,
    }
    with contextlib.ExitStack() as stack:
        for name, fact in facts.items():
            stack.enter_context(mock.patch(name, fact))
        device = {
            "get_device_properties": _PROPERTIES,
            "get_compute_capability": 90,
            "is_bf16_supported": True,
        }
        for name, value in device.items():
            told = staticmethod(lambda *_, value=value, **__: value)
            stack.enter_context(mock.patch.object(CudaInterface, name, told))
        # It tries the write that it plans on fake tensors, for which torch asks CUDA.
        written = "torch._inductor.fx_passes.reinplace._inplace_generalized_scatter"
        stack.enter_context(mock.patch(written, lambda written, value, views: written))
        # Likewise for the result of attention, which it copies into the order of the queries.
        # (By its module's name: the package has an operator of that name in its place.)
        flex = importlib.import_module("torch._higher_order_ops.flex_attention")
        stack.enter_context(mock.patch.object(flex, "_permute_strides", _in_order_of))
        # For fake results torch decomposes these, and asks CUDA on the way.
        empty = {op: lambda x, *_: torch.empty_like(x) for op in _DECOMPOSED}
        stack.enter_context(mock.patch.dict(decomposition_table, empty))
        stack.enter_context(config.patch(force_disable_caches=True, compile_threads=1))
        # Constants it would compute on the GPU.
        stack.enter_context(config.patch(joint_graph_constant_folding=False))
        yield
