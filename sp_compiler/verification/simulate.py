"""Simulation of all ranks of a tensor-parallel group in one process, without a process group.

A :class:`LocalTensor` holds the parts of every rank; an operation on it runs once per rank, and
functional collectives are intercepted and computed on the parts. Nothing in ``torch.distributed``
is initialised or changed, so this works next to any default group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from sp_compiler.base.errors import ArgumentError, RankMismatchError
from sp_compiler.base.placement import I, Placement
from sp_compiler.base.shards import join_parts, local_part
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import written_arguments
from sp_compiler.ir.program import Ref
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.registry import operator_of
from sp_compiler.runtime.executor import Executor
from sp_compiler.verification.judge import backward

_c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def simulated_ranks(world_size: int) -> Iterator[Communicator]:
    """Context with a communicator whose tensors are :class:`LocalTensor`, including its rank.

    >>> full = torch.ones(2)
    >>> with simulated_ranks(2) as tp:
    ...     gather_check(tp.all_reduce(scatter(full, P, 2), "P", "I"), I)
    tensor([1., 1.])
    """
    if world_size == 1:
        yield Communicator(None, 0, 1)
        return
    # The rank is a tensor as well: a number would be the same on all ranks, and so would every
    # slice that depends on it.
    rank = LocalTensor({index: torch.tensor(index, device="cpu") for index in range(world_size)})
    with SimulationMode(world_size):
        yield _SimulatedRanks(None, rank, world_size)


class _SimulatedRanks(Communicator):
    def on_each_rank(
        self,
        function: Callable[[int | Tensor, Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
    ) -> Sequence[Any]:
        """Call ``function(rank, values)`` on the parts of each rank; return each result as one
        value for all ranks."""
        results = {
            index: function(rank, [_on_rank(value, index) for value in values])
            for index, rank in self.rank._local_tensors.items()  # type: ignore[union-attr]
        }
        return [
            LocalTensor(dict(zip(results, parts, strict=True)))
            for parts in zip(*results.values(), strict=True)
        ]


def scatter(full: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Return the ranks' parts of ``full`` as a :class:`LocalTensor`, or a plain tensor for one
    rank.

    A partial sum has the full value on rank 0 and zeros elsewhere. Ranks never share memory.

    Raises:
        ArgumentError: ``full`` was created while ranks are simulated, so it is not a full tensor.
    """
    if isinstance(full, LocalTensor):
        raise ArgumentError(
            "scatter() of a tensor that already has one part per rank; factories such as "
            "torch.randn make such tensors while ranks are simulated, so make full tensors before"
        )
    # Detached: the ranks' backward must not write the caller's gradients.
    full = full.detach()
    if world_size == 1:
        return full.clone()
    return LocalTensor(
        {rank: local_part(full, placement, rank, world_size) for rank in range(world_size)}
    )


def gather_check(local: Tensor, placement: Placement) -> Tensor:
    """Return the full tensor of the ranks' parts; raise an error if ranks that must agree differ.

    Raises:
        RankMismatchError: a replicated value is not bitwise equal on every rank.
    """
    if not isinstance(local, LocalTensor):
        return local.detach().clone()
    # In the order of ranks, whatever order a collective has left.
    parts = [local._local_tensors[rank] for rank in sorted(local._ranks)]
    return join_parts(parts, placement)


@dataclass(frozen=True)
class SimulatedStep:
    """Full tensors after one forward and backward on simulated ranks.

    Attributes:
        outputs: the flat outputs of the model.
        grads: gradient of each parameter by name; ``None`` if it has none.
        input_grads: gradient of each flat input; ``None`` if it has none.
        mutated_buffers: new values by name.
    """

    outputs: list[Any]
    grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    mutated_buffers: dict[str, Tensor]


def simulate_step(
    compiled: CompiledProgram,
    full_params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    flat_inputs: Sequence[Any],
    seed: Tensor | None = None,
    output_grads: Sequence[Tensor | None] | None = None,
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> SimulatedStep:
    """Run a compiled program forward and backward on all ranks in this process.

    Args:
        compiled: the program, for any world size.
        full_params: stored name to full parameter; those with ``requires_grad`` get gradients.
        buffers: name to buffer.
        flat_inputs: flattened user inputs, full tensors.
        seed: 0-dim int64, required if the program draws random numbers.
        output_grads: gradient of each flat output, or ``None``. By default 1 for the loss, else
            ones for every differentiable output; no backward if none is differentiable.
        mode: a mode entered inside the simulation's, so that it sees each operation, including our
            own operators, once for all ranks.

    Raises:
        RankMismatchError: replicated outputs or gradients differ between ranks.
    """
    world_size, placements = compiled.world_size, compiled.param_placements
    # By the executor, as on real ranks: its wiring of calls is tested too.
    with simulated_ranks(world_size) as tp, mode():
        params = {
            name: scatter(value, placements[name], world_size).requires_grad_(value.requires_grad)
            for name, value in full_params.items()
            if name in placements
        }
        # Every rank gets the same batch, as in a user's call.
        inputs = [_scatter_input(value, world_size) for value in flat_inputs]
        replicated = {name: scatter(value, I, world_size) for name, value in buffers.items()}
        run = Executor(compiled, tp).run(params, replicated, inputs, seed)
        refs = compiled.program.outputs
        _backward(run.outputs, refs, compiled, output_grads)
        outputs = [
            gather_check(value, compiled.placement(ref)) if isinstance(ref, Ref) else value
            for value, ref in zip(run.outputs, refs, strict=True)
        ]
        grads = {
            name: None if value.grad is None else gather_check(value.grad, placements[name])
            for name, value in params.items()
        }
        # The gradient of an input is full on each rank, since nothing outside would reduce it.
        input_grads = [
            gather_check(value.grad, I)
            if isinstance(value, Tensor) and value.grad is not None
            else None
            for value in inputs
        ]
        mutated = {
            name: gather_check(value, compiled.placement(compiled.program.mutated_buffers[name]))
            for name, value in run.mutated_buffers.items()
        }
    return SimulatedStep(outputs, grads, input_grads, mutated)


def _scatter_input(value: Any, world_size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return scatter(value, I, world_size).requires_grad_(value.requires_grad)


def _backward(
    outputs: Sequence[Any],
    refs: Sequence[Any],
    compiled: CompiledProgram,
    output_grads: Sequence[Tensor | None] | None,
) -> None:
    if output_grads is None:
        backward(outputs, compiled.program.out_spec)
        return
    roots, tangents = [], []
    for value, ref, grad in zip(outputs, refs, output_grads, strict=True):
        if isinstance(value, Tensor) and value.requires_grad and grad is not None:
            roots.append(value)
            tangents.append(scatter(grad, compiled.placement(ref).dual, compiled.world_size))
    if roots:
        torch.autograd.backward(roots, tangents)


class SimulationMode(LocalTensorMode):
    """:class:`LocalTensorMode` whose functional collectives need no process group.

    It is also faster: the random state is not saved and restored around every operation of every
    rank, since generated code draws no random numbers from it.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Before LocalTensorMode, which would look up the group of each collective.
        if func.namespace == "_c10d_functional":
            return _collective(func, args)
        if func.namespace == "sp_compiler":
            return self._run_kernel(func, args)
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return super().__torch_dispatch__(func, types, args, kwargs)
        items = list(_items((*args, *kwargs.values())))
        is_plain = not any(isinstance(item, LocalTensor) for item in items)
        # A factory, which has no tensor operands, makes a part on every rank.
        if is_plain and (self._disable or any(isinstance(item, Tensor) for item in items)):
            return func(*args, **kwargs)
        # These return sizes that all ranks share, not tensors that could be combined.
        if func is torch.ops.aten.dim.default or func.overloadpacket is torch.ops.aten.sym_size:
            return super().__torch_dispatch__(func, types, args, kwargs)
        results = [
            func(*_on_rank(args, rank), **{key: _on_rank(v, rank) for key, v in kwargs.items()})
            for rank in sorted(self.ranks)
        ]
        if func._schema.is_mutable:
            return _mutated(func, args, kwargs, results)
        return _combine(results)

    def _run_kernel(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Run one of our operators, whose kernel communicates: it gets the parts of all ranks at
        once.

        This mode is disabled while it dispatches. A new one is entered, since entering this one
        again would leave it disabled afterwards.
        """
        operator = operator_of(func)
        assert operator is not None
        with SimulationMode(len(self.ranks)):
            return operator.run(*args)


def _items(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _on_rank(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank]
    if isinstance(value, (list, tuple)):
        return type(value)(_on_rank(item, rank) for item in value)
    return value


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> Any:
    """Return the result of an in-place or out= operation: the argument that it changed."""
    if not func._schema.returns:
        return None
    for changed in written_arguments(func, args, kwargs):
        # The argument itself, as torch returns it; its sizes may have changed.
        if isinstance(changed, LocalTensor):
            changed._sync_meta()
            return changed
    return _combine(results)


def _combine(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return LocalTensor(dict(enumerate(results)))
    if isinstance(first, (list, tuple)):
        return type(first)(_combine(list(items)) for items in zip(*results, strict=True))
    # A branch on it would send ranks to different collectives.
    if any(result != first for result in results):
        raise RankMismatchError(
            f"an operation gave {results} on ranks 0 to {len(results) - 1}; a Python number must "
            "be the same on every rank"
        )
    return first


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def _collective(func: Any, args: tuple[Any, ...]) -> Any:
    """Run a functional collective over all simulated ranks."""
    x = args[0]
    if func is _c10d.wait_tensor.default:
        return x
    if not isinstance(x, LocalTensor):
        raise ArgumentError(f"{func} on a plain tensor while ranks are simulated; use scatter()")
    parts = [x._local_tensors[rank] for rank in sorted(x._ranks)]
    world_size = len(parts)
    if func is _c10d.all_gather_into_tensor.default:
        # Copies: in shared memory, all ranks would see a write by one.
        full = torch.cat(parts)
        results = [full.clone() for _ in parts]
    elif func in (_c10d.all_reduce.default, _c10d.all_reduce_.default):
        full = _REDUCTIONS[args[1]](torch.stack(parts))
        in_place = func is _c10d.all_reduce_.default
        results = [part.copy_(full) if in_place else full.clone() for part in parts]
    elif func is _c10d.reduce_scatter_tensor.default:
        full = _REDUCTIONS[args[1]](torch.stack(parts))
        results = [part.clone() for part in full.chunk(world_size)]
    elif func is _c10d.all_to_all_single.default:
        sends = [part.split(args[2]) for part in parts]
        results = [torch.cat([send[rank] for send in sends]) for rank in range(world_size)]
    elif func is _c10d.broadcast.default:
        results = [parts[args[1]].clone() for _ in parts]
    else:
        raise ArgumentError(
            f"{func} is not simulated; there are all_gather_into_tensor, all_reduce, "
            "all_reduce_, reduce_scatter_tensor, all_to_all_single and broadcast"
        )
    return LocalTensor(dict(enumerate(results)))
