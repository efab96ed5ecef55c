"""Delivery of the gradients of distributed parameters to where autograd would put them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.storage import share_elements
from sp_compiler.runtime.mesh_axes import TENSOR_AXIS

_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # no stub
# Number of the backward that put a gradient into its parameter. As an attribute of the gradient it
# disappears together with it, while a table would not notice ``grad = None``.
_BACKWARD = "_sp_backward"

# Set on parameters whose gradients FSDP reduces in hooks, which do not run in a backward that is
# asked for particular parameters.
_REDUCED_BY_HOOKS = "_sp_reduced_by_hooks"

ParameterEdge = tuple[int, int, DTensorSpec]
"""Index among the inputs of an autograd function, index among its tensor inputs, gradient's spec.

Not the parameter itself: fully_shard frees what it gathered."""


opaque = torch.compiler.disable(
    reason="the backward of a model of sp_compiler is code that is compiled already"
)
"""Decorator of backwards, which ``torch.compile`` of a training step would trace otherwise."""


class CompiledFunction(torch.autograd.Function):
    """Base of autograd functions that no transform of ``torch.func`` reaches.

    :func:`~sp_compiler.runtime.region_call.refuse_transforms` raises before. So ``apply`` bypasses
    torch's own, which searches all arguments for wrappers of transforms and takes half of the time
    to record a block with a dozen parameters.
    """

    apply = vars(torch._C._FunctionBase)["apply"]

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Refuse compiled autograd, which calls this of each node before it runs any."""
        raise UnsupportedError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) cannot trace the backward "
            "of a compiled model, which is generated code that puts gradients into parameters "
            "itself; call loss.backward() outside of it"
        )


def local_tensor(value: Any) -> Any:
    """Return this rank's part of a DTensor; anything else unchanged."""
    return value._local_tensor if isinstance(value, DTensor) else value


def mark_reduced_by_hooks(parameter: Tensor) -> None:
    """Make :func:`refuse_as_inputs` raise for a parameter that FSDP manages, gathered or not."""
    setattr(parameter, _REDUCED_BY_HOOKS, True)


def refuse_as_inputs(inputs: Sequence[Any]) -> None:
    """Raise an error if a backward is asked for gradients of particular parameters on a data axis.

    This happens before it starts: a backward that fails between FSDP's hooks leaves FSDP in an
    invalid state.
    """
    if any(hasattr(value, _REDUCED_BY_HOOKS) for value in inputs):
        raise UnsupportedError(
            "torch.autograd.grad or backward(inputs=...) of parameters on a data axis would leave "
            "one rank's gradients, not averaged over the parts of the data, or none: FSDP2 reduces "
            "in the hooks of loss.backward(). Call that without inputs, or compile with fsdp=False "
            "and reduce gradients yourself"
        )


def refuse_batched(grads: Sequence[Tensor | None]) -> None:
    """Raise an error if a backward is given a batch of gradients, as by a transform of torch."""
    # There are two kinds: those of torch.vmap, and those of torch.autograd.
    if torch._C._are_functorch_transforms_active() or any(
        grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads
    ):
        raise UnsupportedError(
            "the backward of a compiled model takes one gradient of each output, not a batch of "
            "them (is_grads_batched=True, vectorize=True of torch.autograd.functional, or "
            "torch.vmap around torch.autograd.grad); loop over the gradients, with "
            "retain_graph=True, or use the original model for this"
        )


def refuse_unreached(
    functions: Sequence[tuple[str, frozenset[int]]], grads: Sequence[Tensor | None]
) -> None:
    """Raise an error if a backward of the user's own would run although no gradient reaches it.

    Args:
        functions: see :class:`~sp_compiler.ir.compiled_program.Reached`.
        grads: gradient of every output of the region, ``None`` if there is none.
    """
    for line, outputs in functions:
        if all(grads[output] is None for output in outputs):
            raise UnsupportedError(
                f"the backward of a torch.autograd.Function or of a custom operator ({line}) is "
                "not linear, so it must not run if no gradient reaches its results, but the "
                "compiled code would run it, with zeros: no output of its layer that depends on it "
                "has a gradient, while others have. Call backward from a loss that depends on it, "
                "leave it out where the loss does not, or use the original model"
            )


def parameter_edges(
    inputs: Sequence[Any], with_partial_gradient: Collection[int] = ()
) -> list[ParameterEdge]:
    """Return the ``inputs`` that are distributed parameters, with the specs of their gradients."""
    edges: list[ParameterEdge] = []
    num_tensors = 0
    for index, value in enumerate(inputs):
        if isinstance(value, DTensor):
            spec = value._spec
            if index in with_partial_gradient:
                spec = partial_spec(spec)
            edges.append((index, num_tensors, spec))
            num_tensors += 1
        elif isinstance(value, Tensor):  # autograd counts no others
            num_tensors += 1
    return edges


def partial_spec(spec: DTensorSpec) -> DTensorSpec:
    """Return the spec of a gradient that is a partial sum over "tp", from its parameter's."""
    # "tp" is the last axis; the axis before it divides experts.
    where = (*spec.placements[:-1], Partial()) if _over_tp(spec) else spec.placements
    return DTensorSpec(spec.mesh, where, spec.tensor_meta)


def _over_tp(spec: DTensorSpec) -> bool:
    return spec.mesh.mesh_dim_names is None or spec.mesh.mesh_dim_names[-1] == TENSOR_AXIS


def is_only_added(parameter: Tensor, grad: Tensor) -> bool:
    """Return whether autograd adds ``grad`` to the parameter's as it is: it calls no hooks, and
    converts nothing."""
    return not (
        parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
        or parameter.grad_dtype != grad.dtype
    )


def fills_grad(node: Any) -> bool | None:
    """Return whether this backward fills ``grad`` of the leaf of ``node``.

    ``None`` if ``torch.autograd.grad`` returns the gradient instead. ``backward(inputs=)`` fills
    the named ones.
    """
    if node is None:
        return False
    try:
        fills: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # for a leaf whose gradient is returned
        return None
    return fills


def deliver(
    edges: Sequence[ParameterEdge],
    nodes: Sequence[tuple[Any, int]],
    results: list[Tensor | None],
    grads: Sequence[Tensor | None],
) -> None:
    """Deliver the gradients of parameters among ``results``; separate all that share memory.

    A gradient that is put into ``parameter.grad`` is replaced by ``None``; one that autograd
    handles further becomes a DTensor. No gradient shares memory with another tensor, because
    autograd adds to ``grad`` in place. Autograd copies tensors that have other holders, and notices
    one tensor for two inputs, but not a tensor and its view. Of a DTensor it sees only the wrapper,
    which is always new: two parameters that are added to each other would get one gradient, and
    accumulation into either would change both.

    Args:
        edges: see :func:`parameter_edges`.
        nodes: ``next_functions`` of the autograd function.
        results: this rank's gradients of all its inputs, in the parameters' stored placements;
            changed in place.
        grads: arguments of its backward.
    """
    # One check for all of them: in nearly every region each gradient has its own storage.
    has_shared = _share_storage((*grads, *results))
    # Autograd detaches what it gets, which for a DTensor takes ten times as long as for a tensor,
    # longer than a small kernel. So autograd is bypassed where it would do nothing else.
    backward = None if torch.is_grad_enabled() else torch._C._current_graph_task_id()
    # Reading an attribute of a DTensor takes three times as long while torch looks for a
    # __torch_function__, which DTensor does not have.
    with torch._C.DisableTorchFunctionSubclass():
        for index, edge, spec in edges:
            grad = results[index]
            if grad is None:
                continue
            local = grad.contiguous()
            if has_shared:
                rest = (*grads, *results[:index], *results[index + 1 :])
                if any(
                    other is not None and share_elements(local, local_tensor(other))
                    for other in rest
                ):
                    local = local.clone()
            # Bypasses from_local, whose checks and node take longer than a small kernel, and
            # __init__, which does nothing and takes longer than all the rest.
            wrapped = DTensor.__new__(DTensor, local, spec, requires_grad=False)
            passed_by = backward is not None and _accumulated(nodes[edge][0], wrapped, backward)
            results[index] = None if passed_by else wrapped
    if has_shared:
        _separate(results)


def _share_storage(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether two of ``tensors`` share a storage, or one has none."""
    try:
        storages = [
            (x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()._cdata
            for x in tensors
            if x is not None
        ]
    except NotImplementedError:  # for a sparse gradient
        return True
    return len(set(storages)) < len(storages)


def _separate(results: list[Tensor | None]) -> None:
    """Copy each of ``results``, except DTensors, that overlaps with an earlier one."""
    by_storage: dict[int, list[Tensor]] = {}
    for index, result in enumerate(results):
        if result is None or isinstance(result, DTensor) or result.layout != torch.strided:
            continue
        others = by_storage.setdefault(result.untyped_storage()._cdata, [])
        if any(other is not result and share_elements(result, other) for other in others):
            results[index] = result.clone()
        else:
            others.append(result)


def _accumulated(node: Any, grad: DTensor, backward: int) -> bool:
    """Store ``grad`` in the parameter of ``node`` as autograd would, if possible; return whether it
    was.

    It is possible for the first gradient of a parameter without hooks, in a backward that fills
    ``grad``. Further gradients of the same backward (a weight that several regions use) are added
    in autograd's order, so that sums are bitwise the same. Adding to a ``grad`` from before the
    backward is left to autograd.
    """
    if not isinstance(node, _AccumulateGrad):
        return False
    parameter = node.variable
    if not parameter.requires_grad:  # frozen since the forward
        return False
    if not is_only_added(parameter, grad):
        return False
    present = parameter.grad
    # A partial sum of one region, a full one of another: autograd lets DTensor convert one.
    if present is not None and (
        getattr(present, _BACKWARD, None) != backward or present.placements != grad.placements
    ):
        return False
    if not fills_grad(node):
        return False
    if present is None:
        setattr(grad, _BACKWARD, backward)
        parameter.grad = grad
    else:
        present._local_tensor.add_(grad._local_tensor)
        torch.autograd.graph.increment_version(present)  # the local part has its own counter
    return True
