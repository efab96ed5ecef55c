"""From a function to ATen operators, and from those to Inductor's kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.torch_version import TorchVersion

from sp_compiler.base.pass_report import Pass
from sp_compiler.inductor.inlining import Inlining, with_nodes
from sp_compiler.inductor.shortcuts import shortcuts
from sp_compiler.ir.rewriting import make_call
from sp_compiler.ir.symbolic import example_number
from sp_compiler.ops.communicator import Communicator

_aten = torch.ops.aten
_PINNED = {
    # Its default moves recomputation, and waits for collectives, to other places.
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    # Quotients and results of 16 bits are rounded where eager code rounds them.
    "eager_numerics.division_rounding": True,
    "emulate_precision_casts": True,
    # torch.rand and the like would draw other numbers than in eager code (pytorch#198333).
    "fallback_random": True,
    # A chain of up to this many operators is computed twice instead of stored: the hash of a mask
    # element has 50, which the default would split into two passes over memory.
    "realize_opcount_threshold": 64,
    # The hash that draws masks overflows, which is undefined for signed integers in C++: without
    # -fwrapv gcc draws other masks than eager code. No setting adds a compiler flag; this one is
    # copied to the command line and to the cache key. So is the number of fixes in this module,
    # which no code reads: caches may have kernels from before a fix. Raise it with each fix.
    "cpp.enable_floating_point_contract_flag": "off -fwrapv -DSP_COMPILER_MENDS=4",
}

_NORMS = (
    _aten.native_layer_norm.default,
    _aten.native_group_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit_functional.default,
    _aten._native_batch_norm_legit.no_stats,
)


@dataclass(frozen=True)
class Traced:
    """A function as a graph.

    Attributes:
        module: placeholders are the rank, if it is read, and the arguments at ``places``.
        mode: the fake tensor mode of the trace.
        fakes: fake value of each placeholder.
        places: positions of the arguments that are tensors or open sizes; the others are constants.
        arranges: for each of them a function that gives a tensor the dtype and the memory layout of
            the trace; ``None`` if none is needed.
        takes_rank: whether the first placeholder is the rank.
        several: whether the function returns a tuple.
    """

    module: GraphModule
    mode: FakeTensorMode
    fakes: Sequence[Any]
    places: Sequence[int]
    arranges: Sequence[Callable[[Tensor], Tensor] | None]
    takes_rank: bool
    several: bool

    @property
    def results(self) -> Any:
        """What the function returns for the fake tensors."""
        results = map_arg(self.module.graph.output_node().args[0], lambda node: node.meta["val"])
        return tuple(results) if self.several else results[0]


def trace(
    function: Callable[..., Any], tp: Communicator, arguments: Sequence[Any], inlining: Inlining
) -> Traced:
    """Trace ``function(tp, *arguments)`` with fake tensors, one of them the rank.

    The graph has no mutation and none of our custom operators, whose kernels are traced through;
    ``inlining`` has graphs of some, for tensors of this fake tensor mode. Every argument has a
    placeholder of its own, because real arguments may differ where the fake ones are one tensor.
    """
    # The decomposition of a maximum pool reads ``torch._inductor.lowering`` without importing it.
    import torch._inductor.lowering
    from torch._inductor import config

    places = [i for i, value in enumerate(arguments) if isinstance(value, Tensor | torch.SymInt)]
    several = False

    def flat(rank: Tensor, *values: Any) -> list[Tensor]:
        nonlocal several
        given = list(arguments)
        for place, value in zip(places, values, strict=True):
            given[place] = value
        on_rank = Communicator(None, rank, tp.world_size)
        # Open sizes are symbols of one trace, which another trace could not map to its own.
        result = function(on_rank if is_open else with_nodes(on_rank), *given)
        several = isinstance(result, tuple)
        return list(result) if several else [result]

    # If two arguments are one object, the graph would read one placeholder for both.
    values = _each_its_own([tp.rank, *[arguments[place] for place in places]])
    mode = detect_fake_mode(values)
    assert mode is not None
    # With open sizes operators must decompose in Python, where sizes may be symbols; with fixed
    # ones they do so in C++, which is faster.
    is_open = any(isinstance(x, torch.SymInt) or x._has_symbolic_sizes_strides for x in values)

    def traced(function: Callable[..., Any], *values: Any) -> GraphModule:
        functional = torch.func.functionalize(function)
        return make_fx(functional, decomposition_table=_decompositions())(*values)

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # Where results of 16 bits are rounded is marked in the trace.
        stack.enter_context(config.patch(_PINNED))
        # The graph never runs as Python code: only the key of Inductor's cache needs its text.
        stack.enter_context(_use_lazy_graph_module(True))
        if is_open:
            stack.enter_context(enable_python_dispatcher())
        module = traced(flat, *values)
        graph = module.graph
        rank = graph.find_nodes(op="placeholder")[0]
        inlining.run(graph, rank, traced)
        _copy_parts(graph)
    graph.eliminate_dead_code()
    takes_rank = bool(rank.users)
    if not takes_rank:
        graph.erase_node(rank)
        values = values[1:]
    module.recompile()
    arranges = [_arrangement(arguments[place]) for place in places]
    return Traced(module, mode, values, places, arranges, takes_rank, several)


def _copy_parts(graph: Graph) -> None:
    """Return copies of results that are parts of a value which is computed here and not returned.

    Of a view Inductor keeps the order of the strides, not the strides: where it computes only the
    part, that is dense, and kernels that take it expect the strides of the trace.
    """
    output = graph.output_node()
    results = [node for node in output.args[0] if isinstance(node, Node)]
    whole = [*graph.find_nodes(op="placeholder"), *filter(_is_dense, results)]
    elsewhere = {_storage(node) for node in whole if isinstance(node.meta["val"], Tensor)}
    copies: dict[Node, Node] = {}
    for node in dict.fromkeys(results):
        if not _is_dense(node) and _storage(node) not in elsewhere:
            with graph.inserting_before(output):
                clone = _aten.clone.default
                copies[node] = make_call(graph, clone, (node,), like=node, origin=Pass.CODEGEN)
    output.args = ([copies.get(node, node) for node in output.args[0]],)


def _is_dense(node: Node) -> bool:
    """Return whether the elements of a result fill its memory; expanded ones count once."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return True
    for dim, stride in enumerate(value.stride()):
        if stride == 0:
            value = value.narrow(dim, 0, 1)
    return is_non_overlapping_and_dense_or_false(value)


def _storage(node: Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    norms = {each: _with_kept_statistics(table[each]) for each in _NORMS if each in table}
    return {**table, **norms}


def _with_kept_statistics(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return the norm with statistics of the dtype that the CPU's kernel gives them.

    Torch's decomposition rounds them to 16 bits if the input has 16, even if weights of 32 bits, as
    under autocast, make the kernel keep 32, which the kernel of the gradient then requires.
    """

    @functools.wraps(norm)
    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        others = (*args, *kwargs.values())
        is_mixed = any(isinstance(y, Tensor) and y.dtype is torch.float32 for y in others)
        if x.device.type != "cpu" or x.dtype.itemsize > 2 or not is_mixed:
            return tuple(norm(x, *args, **kwargs))
        result, *statistics = norm(x.float(), *args, **kwargs)
        return result.to(x.dtype), *statistics

    return decomposed


def _each_its_own(values: Sequence[Any]) -> list[Any]:
    seen: set[int] = set()
    result = []
    for value in values:
        is_seen = isinstance(value, Tensor) and id(value) in seen
        seen.add(id(value))
        result.append(value.detach() if is_seen else value)
    return result


def compile_graph(traced: Traced) -> Callable[[list[Any]], Sequence[Any]]:
    """Return kernels for the graph, from Inductor's cache on disk if an equal graph was compiled
    before."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    output = traced.module.graph.output_node()
    # Users of a result rely on the strides that it has in eager code.
    output.meta["user_visible_output_idxs"] = range(len(output.args[0]))
    if traced.mode.shape_env is None:
        # The cache asks it for the guards of an entry, and skips a graph without one.
        traced.mode.shape_env = ShapeEnv()
    context = tracing(TracingContext(traced.mode))
    settings = context, config.patch(_PINNED), shortcuts()
    mends = (
        _own_values_read_first(),
        _written_values_awaited(),
        _small_values_exact(),
        _narrow_values_rounded(),
    )
    with contextlib.ExitStack() as stack:
        for each in (*settings, *mends):
            stack.enter_context(each)
        fakes = [_in_present_symbols(fake) for fake in traced.fakes]
        for node, fake in zip(traced.module.graph.find_nodes(op="placeholder"), fakes, strict=True):
            node.meta["val"] = fake
        kernels: Any = compile_fx_inner(traced.module, fakes, is_inference=True)
    return kernels


def _in_present_symbols(value: Any) -> Any:
    """Return an open size in the symbols of tensors' shapes, anything else as it is.

    The capture may have found out later that two inputs have equal sizes (ids and labels). Inductor
    reads the old symbol of a size that is an argument, and the new one from shapes.
    """
    if not isinstance(value, torch.SymInt):
        return value
    node = value.node
    if node.expr.is_number:
        return int(node.expr)
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


@contextlib.contextmanager
def _own_values_read_first() -> Iterator[None]:
    """Context in which ``index_put`` does not write into the tensor that it takes its values from.

    Inductor lets it do so if nothing after it reads the old values, and does not see that the
    operator itself still reads them: rows that are added to other rows would be added twice.
    """
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    targets = (_aten.index_put.default, _aten._unsafe_index_put.default)
    checked = {
        each: replace(inplaceable_ops[each], extra_check=_reads_other_memory) for each in targets
    }
    with mock.patch.dict(inplaceable_ops, checked):
        yield


def _reads_other_memory(node: Node) -> bool:
    changed, values = (node.args[place].meta["val"] for place in (0, 2))
    return bool(values.untyped_storage()._cdata != changed.untyped_storage()._cdata)


@contextlib.contextmanager
def _written_values_awaited() -> Iterator[None]:
    """Context in which readers of what is written in place run after the write.

    To fuse loops over different sizes, Inductor's C++ backend recomputes what an operator reads,
    and loses that it is the result of a scatter into a buffer: it reads the buffer as it was before
    (https://github.com/pytorch/pytorch/pull/185873). Torch 2.11 also loses what it must wait for.
    """
    from torch._inductor.dependencies import Dep, StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def and_restore(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        reads = node.read_writes.reads
        waits = OrderedSet[Dep](dep for dep in reads if isinstance(dep, (StarDep, WeakDep)))
        recompute(node, *args, **kwargs)
        found = node.read_writes.with_read(waits)
        node.set_read_writes(found.rename(node.mutation_renames))

    with mock.patch.object(SchedulerNode, "recompute_size_and_body", and_restore):
        yield


@contextlib.contextmanager
def _small_values_exact() -> Iterator[None]:
    """Context in which vectors compute ``expm1`` and ``atanh`` by the functions of eager code.

    Inductor's C++ backend writes ``exp(x) - 1`` and a logarithm of ``(1 + x) / (1 - x)``, in which
    a small ``x`` loses its digits.
    """
    from torch._inductor.codegen.cpp import CppVecOverrides

    with (
        mock.patch.object(CppVecOverrides, "expm1", staticmethod(lambda x: f"{x}.expm1()")),
        mock.patch.object(CppVecOverrides, "atanh", staticmethod(lambda x: f"{x}.atanh()")),
    ):
        yield


@contextlib.contextmanager
def _narrow_values_rounded() -> Iterator[None]:
    """Context in which kernels round values of 16 bits like eager code.

    Up to torch 2.12, ``emulate_precision_casts`` alone does not do that: the C++ backend remembers
    what a result was before it was rounded, and reads that
    (https://github.com/pytorch/pytorch/issues/185337), and numbers keep 32 bits when results of 16
    are compared with them.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        yield
        return
    from torch._inductor import lowering
    from torch._inductor.codegen.cpp import CppKernel

    promote = lowering.promote_constants

    @functools.wraps(promote)
    def promote_rounded(
        inputs: Sequence[Any], override_return_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Sequence[Any]:
        compared = next((x.get_dtype() for x in inputs if hasattr(x, "get_dtype")), None)
        if override_return_dtype is torch.bool and compared in (torch.bfloat16, torch.float16):
            inputs = [
                torch.tensor(x, dtype=compared).item() if isinstance(x, int | float) else x
                for x in inputs
            ]
        return promote(inputs, override_return_dtype, **kwargs)

    with (
        mock.patch.object(CppKernel, "cache_dtype_convert", return_value=None),
        mock.patch.object(lowering, "promote_constants", promote_rounded),
    ):
        yield


def _arrangement(fake: Any) -> Callable[[Tensor], Tensor] | None:
    """Return a function that gives a tensor the memory layout of ``fake``, by a copy if need be.

    It also gives it ``fake``'s dtype: a function that runs uncompiled may return another one than
    its fake kernels say, and kernels would misread the memory.
    """
    if not isinstance(fake, Tensor):
        return None
    dtype = fake.dtype
    if fake.is_contiguous():
        # The dtype is compared first: a call that does nothing takes as long as any other.
        return lambda x: (x if x.dtype is dtype else x.to(dtype)).contiguous()
    order = sorted(range(fake.dim()), key=lambda dim: -example_number(fake.stride(dim)))
    if not fake.permute(order).is_contiguous():
        return None  # a part of a larger tensor, which the function itself has made
    back = [order.index(dim) for dim in range(fake.dim())]
    return lambda x: x.to(dtype).permute(order).contiguous().permute(back)
