"""Parameters that FSDP2 manages (``fully_shard``, ``replicate``) in a compiled module.

A parameter is gathered only between the hooks of its FSDP module, so it is read in its block. The
gradient of a parameter that is replicated over "tp" is a partial sum there. It remains partial
through FSDP's reduce-scatter, which is linear, and is summed over "tp" afterwards, on the shard::

    block's backward ── partial gradient ──> FSDP's reduce-scatter over dp_shard
                                                       │  1/dp of it, still partial
    end of the backward <── one all-reduce over tp for all such parts of a dtype
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import warn
from sp_compiler.grid.adapted_groups import adapt
from sp_compiler.grid.same_gradients import SameGradients
from sp_compiler.grid.watched_group import watch
from sp_compiler.runtime.mesh_axes import EXPERT_AXIS
from sp_compiler.runtime.parameter_gradients import mark_reduced_by_hooks

Reduce = Callable[[Sequence[Tensor | None]], list[Tensor | None]]


class FullySharded:
    """The parameters of one module that FSDP2 manages.

    Args:
        modules: path to module of the whole tree.
        reduce: function that sums over the tensor-parallel ranks.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reduce: Reduce) -> None:
        self._tree = modules
        self._groups: list[Any] = []
        # Found once: every step needs them several times, and a walk through the tree takes as long
        # as a small layer.
        self._compared = SameGradients(lambda: self._groups)
        self._reduction = _LateReduction(reduce, self._compared)
        self._num_hooks = 0
        self._parameters: dict[str, Any] = {}
        self._left_out: list[str] = []
        self._states: list[Any] = []

    def parameters(self, num_hooks: int) -> Mapping[str, Any]:
        """Return FSDP's record of every managed parameter, by name.

        Args:
            num_hooks: number of hooks registered on the modules so far. FSDP registers some when it
                is applied; searching all modules in every call would be too slow.
        """
        if num_hooks != self._num_hooks:
            self._num_hooks = num_hooks
            self._parameters = self._find()
        return self._parameters

    def warn_of_left_out(self) -> None:
        """Warn of trained parameters that FSDP does not manage although it manages others.

        This happens if it was applied only to the layers, without the module itself. The gradients
        of these parameters are not summed over the data axes. It is only a warning, because users
        may sum them themselves.
        """
        left_out, self._left_out = self._left_out, []
        if left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            warn(
                f"FSDP2 manages some parameters of this module, but not {', '.join(left_out[:3])}"
                f"{more}: their gradients are not reduced over the data axes, so that each part "
                "of the data trains its own copy; apply fully_shard to the whole module too, after "
                "its layers"
            )

    def finish_reduction(self) -> None:
        """Sum gradients that FSDP has reduced outside of a backward over tensor-parallel ranks."""
        self._compared.compare()
        self._reduction.finish()

    def end_failed_backward(self) -> None:
        """End the latest backward for FSDP if it raised an error, without its gradients.

        FSDP ends a backward in a callback, which an error drops, and does not begin another one
        before that: later steps would neither gather nor reduce.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward
            return
        for state in self._states:
            if state._state_ctx.post_backward_final_callback_queued:
                self.drop_unreduced()
                state._root_post_backward_final_callback()
                self._reduction.abandon()

    def refuse_nested_backward(self) -> None:
        """Raise an error for a call inside a backward that has reached this module already, if the
        call has a nested backward of its own.

        FSDP ends all backwards of a module once, with the outermost one, and loses gradients.
        """
        if torch._C._current_graph_task_id() == -1:
            return
        # Non-reentrant checkpoints have one backward, and recompute under such hooks.
        is_nested = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        if is_nested and any(
            s._state_ctx.post_backward_final_callback_queued for s in self._states
        ):
            raise UnsupportedError(
                "a checkpoint with use_reentrant=True calls a module on a data axis whose backward "
                "from another call of the same loss has begun: FSDP2 would lose gradients; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )

    def has_unreduced(self) -> bool:
        """Return whether gathered parameters have unreduced gradients."""
        return any(_waiting(record) for record in self._parameters.values()) or any(
            group._partial_reduce_output is not None for group in param_groups(self._tree.values())
        )

    def drop_unreduced(self) -> None:
        """Drop them."""
        # The groups are known from calls; without calls there are no gradients.
        for group in self._groups:
            group._partial_reduce_output = None
            drop_gathered_gradients(group)

    def drop_unreduced_of(self, parameters: Collection[int]) -> None:
        """Drop the gradients of the parameters with these ``id``, sharded or gathered."""
        for record in self._parameters.values():
            gathered = getattr(record, "_unsharded_param", None)
            if id(record.sharded_param) in parameters or id(gathered) in parameters:
                _drop(record)

    def free_gathered(self) -> None:
        """Put the shards back into modules whose last call left gathered parameters.

        FSDP keeps those of the root from a forward to its backward, or for the next forward. After
        a forward without a backward, writes into parameters, for example to swap averaged weights
        in and out, would go into copies that are discarded, or into shards that the next forward
        does not read. All ranks of the data axes must do this: a rank that keeps gathered
        parameters does not take part in the next gather.
        """
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's second forward
            return
        for group in self._groups:
            # If the user keeps them after backward, for microbatches, they stay.
            is_idle = group._training_state == TrainingState.IDLE
            if not group.is_sharded and is_idle and group.reshard_after_backward:
                group.reshard()

    def follow_dtypes(self) -> None:
        """Gather parameters in the dtypes that their shards have been converted to.

        FSDP reads dtypes once, and keeps the buffers that it has gathered into.
        """
        for group in self._groups:
            # FSDP knows no dtype before the first call.
            converted = [
                record
                for record in group.fsdp_params
                if getattr(record, "orig_dtype", record.sharded_param.dtype)
                != record.sharded_param.dtype
            ]
            for record in converted:
                record.all_gather_outputs = []
                vars(record).pop("_unsharded_param", None)  # none in a block that never ran
            if converted:
                group._init_mp_dtypes()

    def shards(self, *, search: bool = False) -> dict[int, nn.Parameter]:
        """Return the shards of parameters that are gathered now, fully or partly, by ``id`` of the
        tensor that is in the module instead.

        Args:
            search: walk through the tree: users may gather (``unshard``) before the first call,
                which finds the groups.
        """
        return {
            id(parameter): record.sharded_param
            for group in (param_groups(self._tree.values()) if search else self._groups)
            if not group.is_sharded
            for record in group.fsdp_params
            for name in ("_unsharded_param", "_sharded_post_forward_param")
            if (parameter := getattr(record, name, None)) is not None
        }

    def _find(self) -> dict[str, Any]:
        modules = self._tree.values()
        self._states = [m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule)]
        self._groups = list(param_groups(modules))
        managed: dict[tuple[int, str], Any] = {}
        for group in self._groups:
            adapt(group)
            watch(group)
            for record in group.fsdp_params:
                info = record._module_info
                owners = [(info.module, info.param_name)]
                owners += zip(info.shared_modules, info.shared_param_names, strict=True)
                managed.update(((id(module), name), record) for module, name in owners)
                self._reduction.take_over(record)
                mark_reduced_by_hooks(record.sharded_param)
        owned = {
            f"{path}.{name}" if path else name: (parameter, managed.get((id(module), name)))
            for path, module in self._tree.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        trained = [name for name, (p, record) in owned.items() if p.requires_grad and not record]
        self._left_out = trained if managed else []
        return {name: record for name, (_, record) in owned.items() if record is not None}


def _refuse_hooks(record: Any) -> None:
    """Raise an error for hooks that do not run under FSDP, because autograd never reaches a shard.

    FSDP itself runs post-accumulate hooks.
    """
    if record.sharded_param._backward_hooks:
        raise UnsupportedError(
            f"{record._param_fqn} has a hook of register_hook(), which FSDP2 does not run; use "
            "parameter.register_post_accumulate_grad_hook(hook), which may change parameter.grad"
        )


def _waiting(record: Any) -> bool:
    # There is no gathered parameter before the first call.
    gathered = getattr(record, "_unsharded_param", None)
    waits_in_grad = gathered is not None and gathered.grad is not None
    return waits_in_grad or record.unsharded_accumulated_grad is not None


def is_divided(parameter: DTensor) -> bool:
    """Return whether ``parameter`` has a part of the experts on each rank of "ep"."""
    return EXPERT_AXIS in (parameter.device_mesh.mesh_dim_names or ())


def drop_gathered_gradients(group: Any) -> None:
    """Drop the gradients of an FSDP group that are not reduced yet."""
    for record in group.fsdp_params:
        _drop(record)


def _drop(record: Any) -> None:
    if hasattr(record, "_unsharded_param"):
        record._unsharded_param.grad = None
    # From torch 2.15 on it is the same gradient, and cannot be set.
    if record.unsharded_accumulated_grad is not None:
        record.unsharded_accumulated_grad = None


def param_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Return the FSDP parameter groups of ``modules``; each group is communicated together."""
    for module in modules:
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # One group per module up to torch 2.11, several since.
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if groups is None else groups
            yield from (group for group in groups if group is not None)


def compute_dtype(record: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype of a managed parameter of ``dtype``."""
    cast = record.mp_policy.param_dtype
    return cast if cast is not None and dtype.is_floating_point else dtype


@contextlib.contextmanager
def without_gradient_sync(root: nn.Module) -> Iterator[None]:
    """Context in which backwards leave FSDP's gradients unreduced, on the gathered parameters."""
    groups = list(param_groups(root.modules()))
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = False
    # Restored, not set: this may be nested, or inside set_requires_gradient_sync(False).
    try:
        yield
    finally:
        for group, (reduce_grads, all_reduce_grads) in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduce_grads, all_reduce_grads


class _LateReduction:
    """Sums all partial gradients that FSDP has reduce-scattered, together at the end of a backward.

    FSDP gets the gradient to reduce from each of its parameter records. A record would sum a
    partial gradient over "tp" at unsharded size, one by one, and delay the backward's own
    collectives. A record that was taken over returns the partial sum unchanged.
    """

    def __init__(self, reduce: Reduce, compared: SameGradients) -> None:
        self._reduce = reduce
        self._compared = compared
        # Record to the gradient that its parameter had before this backward, in order of arrival.
        self._partial: dict[Any, DTensor | None] = {}
        self._backward = -1

    def take_over(self, record: Any) -> None:
        """Sum partial gradients of a parameter managed by FSDP later."""
        if "_get_grad_inner_tensor" in vars(record):
            return
        reduced_at_once = record._get_grad_inner_tensor
        shard = record.sharded_param
        # An expert's gradient covers the rows of all "ep" ranks, whose batches FSDP does not count.
        # (FSDP's own divide factor would divide twice if only one rank shards.)
        num_batches = shard.device_mesh[EXPERT_AXIS].size() if is_divided(shard) else 1

        def unreduced(grad: Tensor) -> Tensor:
            local = taken(grad)
            return local if num_batches == 1 else local.div_(num_batches)

        def taken(grad: Tensor) -> Tensor:
            _refuse_hooks(record)
            self._compared.add(record)
            if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
                local: Tensor = reduced_at_once(grad)
                return local
            # A hook that uses the gradient at once, such as an optimizer step, needs the full sum.
            if record.sharded_param._post_accumulate_grad_hooks:
                full: Tensor = reduced_at_once(grad)
                return full
            self._expect(record)
            return grad._local_tensor

        record._get_grad_inner_tensor = unreduced

    def _expect(self, record: Any) -> None:
        backward = torch._C._current_graph_task_id()
        # Outside of a backward (-1), the caller ends the reduction with ``finish_reduction``.
        if backward != self._backward:
            self.abandon()
            self._backward = backward
            # After FSDP's own callback, which was queued before the first block's backward.
            Variable._execution_engine.queue_callback(self.finish)
        if record not in self._partial:
            # Without the existing gradient, which is already summed and must not be summed again.
            self._partial[record] = record.sharded_param.grad
            record.sharded_param.grad = None

    def abandon(self) -> None:
        """Drop the partial gradients of a backward that raised an error; earlier ones stay."""
        before, self._partial, self._backward = self._partial, {}, -1
        for record, earlier in before.items():
            record.sharded_param.grad = earlier

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients that have arrived since the last call."""
        before, self._partial, self._backward = self._partial, {}, -1
        # None if FSDP keeps a gradient for later (HSDP without its all-reduce).
        arrived = [record for record in before if record.sharded_param.grad is not None]
        parts = [record.sharded_param.grad._local_tensor for record in arrived]
        for record in arrived:
            if record.grad_offload_event is not None:
                record.grad_offload_event.synchronize()
        # Gradients that FSDP offloads are on the CPU, where the group may have no collectives.
        operands = [
            part.to(record.device) if part.numel() else None
            for record, part in zip(arrived, parts, strict=True)
        ]
        for part, total in zip(parts, self._reduce(operands), strict=True):
            if total is not None:
                part.copy_(total)
        for record, earlier in before.items():
            if earlier is None:
                continue
            new = record.sharded_param.grad
            if new is not None:
                earlier._local_tensor.add_(new._local_tensor)
            record.sharded_param.grad = earlier
