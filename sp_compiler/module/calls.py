"""Calls of a compiled module: lookup or compilation of the program, and placement of parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from sp_compiler.base.decisions import callers_modes_kept
from sp_compiler.base.errors import ArgumentError, CaptureError
from sp_compiler.base.log import LOG
from sp_compiler.base.placement import I, Placement
from sp_compiler.grid.data_parallel import apply_data_parallelism
from sp_compiler.grid.initial_weights import agree_on_weights
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.fixed_parts import (
    refuse_no_parameters,
    refuse_other_parameters,
    refuse_untied,
)
from sp_compiler.module.module_tree import MirrorModule
from sp_compiler.module.optimizer_state import place_optimizer_state
from sp_compiler.module.outputs import user_outputs
from sp_compiler.module.parameters import divided, optimizers_of, place
from sp_compiler.module.state import ModuleState
from sp_compiler.module.views import tied_names
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.group import broadcast, broadcast_over_data, forward_seed
from sp_compiler.runtime.kernels import compile_kernels
from sp_compiler.runtime.keys.call_key import CallKey, call_key
from sp_compiler.runtime.keys.differences import differences
from sp_compiler.runtime.parameter_gradients import local_tensor
from sp_compiler.trace.arguments import about_arguments, argument_text
from sp_compiler.trace.attributes.reads import AttributeReads, recorded_attributes
from sp_compiler.trace.environment import without_saved_tensor_hooks
from sp_compiler.trace.export import input_names


def executor_for(state: ModuleState, leaves: list[Any], structure: pytree.TreeSpec) -> Executor:
    """Return the program for these flattened inputs, compiled on all ranks if necessary."""
    parameters = state.parameters.current()
    refuse_other_parameters(state.parameters, parameters, divided=state.group.mesh is not None)
    refuse_untied(state.parameters, state.ties)
    key = call_key(
        state.modules.values(),
        parameters,
        state.buffers.current(),
        leaves,
        structure,
        state.layout.attributes.key(),
        {owner: dtype for owner, (dtype, _) in state.computed_as().items()},
        loss_only=state.loss_only,
    )
    # An equal key is the same object, whose hash is cached: most calls are like the previous one.
    key = state.latest_key = state.latest_key if key == state.latest_key else key
    # A model may branch on values of its inputs: these decisions are part of the key.
    key = state.programs.decided(key, leaves, state.buffers)
    executor = state.programs.get(key, leaves)

    def names() -> list[str]:
        return input_names(state.root, *pytree.tree_unflatten(leaves, structure))

    # Names are made only if ranks disagree, since binding arguments takes time in every call.
    hooks = state.layout.hooks()
    state.agreement.begin_call(key, leaves, names, compiled=executor is not None, hooks=hooks)
    if executor is None:
        executor = _add_program(state, key, leaves, structure)
    state.latest = executor.compiled
    return executor


def _add_program(
    state: ModuleState, key: CallKey, leaves: list[Any], structure: pytree.TreeSpec
) -> Executor:
    """Compile for a call that has no program, and put the program into the cache."""
    refuse_no_parameters(state.parameters)
    # Parameters placed under inference_mode could never be trained.
    with callers_modes_kept(), torch.inference_mode(False), without_saved_tensor_hooks():
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        # Before the capture, which would raise an error from inside torch.export.
        bound = state.original.bound_arguments(args, kwargs)
        arguments = {name: argument_text(value) for name, value in bound.items()}
        open_dims = state.programs.opens(key, leaves)
        if len(state.programs):
            padded = state.programs.lacks_sizes(key, leaves)
            _say_compiled_again(state, key, arguments, open_dims, padded=padded)
        try:
            executor = _compile(state, leaves, structure, open_dims)
        except CaptureError as error:
            # If only buffers are still on meta, the capture sees two devices.
            missing = state.without_data()
            if missing and set(missing).isdisjoint(state.parameters):
                raise ArgumentError(_no_data(missing, state)) from error
            known = state.original.argument_names
            about = about_arguments(error, arguments, state.compiled_for[0], known)
            raise about from error.__cause__
        # Includes attributes that no compilation has read before.
        key = replace(key, attributes=state.layout.attributes.key())
        state.compiled_for = arguments, key
    if not _is_other_rank():
        inputs = ", ".join(f"{name} {text}" for name, text in arguments.items())
        state.programs.warn_of_sizes(key, leaves, inputs)
    program = executor.compiled.program
    key = replace(key, decisions=tuple(map(str, program.decisions)))
    # Only now it is known what the forward reads.
    state.agreement.require_equal("has compiled", key.parts())
    state.programs.put(key, executor, program.sizes, program.decisions)
    return executor


def _say_compiled_again(
    state: ModuleState,
    key: CallKey,
    arguments: Mapping[str, str],
    open_dims: bool,
    *,
    padded: bool,
) -> None:
    """Log on rank 0 why a module is compiled again, since that takes seconds or minutes inside a
    training step.

    ``padded``: whether padding to one size would avoid it.
    """
    if _is_other_rank():
        return
    latest, old = state.compiled_for
    changed = [f"{name} {text}" for name, text in arguments.items() if latest.get(name) != text]
    if old is not None:
        before = state.layout.attributes.text_before
        changed += differences(old, key, state.modules, state.parameters, state.buffers, before)
    once = ", once for all other sizes: it takes about three times as long as the first time"
    how = once if open_dims else ""
    if padded:
        how += "; inputs padded to one size avoid it"
    model = type(state.original.model).__name__
    LOG.warning("%s is compiled again for %s%s", model, ", ".join(changed) or "these inputs", how)


def _is_other_rank() -> bool:
    return dist.is_initialized() and dist.get_rank() > 0


def shard_over_data(state: ModuleState) -> None:
    """Apply FSDP2 over the mesh's data axes, once, unless the user does it.

    Raises:
        ArgumentError: an optimizer holds the parameters, which FSDP2 replaces.
    """
    if state.fsdp_options is None:
        return
    for optimizer in optimizers_of(state.root.parameters()):
        raise ArgumentError(
            f"{type(optimizer).__name__} holds parameters that are not placed yet, and "
            "fully_shard replaces them; pass example_inputs to sp_compiler.compile (or call the "
            "module once), and create the optimizer afterwards"
        )
    # Cleared first, so that nested calls do not apply it again.
    options, state.fsdp_options = state.fsdp_options, None
    try:
        compiled = state.compiled("data parallelism")
        apply_data_parallelism(state.root, compiled, state.group, options)
    except BaseException:
        state.fsdp_options = options  # or later calls would not reduce gradients over data axes
        raise


def run(state: ModuleState, executor: Executor, leaves: list[Any]) -> Any:
    """Run one forward; return the model's own output type."""
    if executor.compiled.kernels:
        # Not when the program is compiled: a plan needs no kernels, and a module may be moved
        # before it runs.
        compile_kernels(state.agreement, executor.compiled)
    seed = forward_seed(state.group, state.device()) if executor.needs_seed else None
    if state.steps is None:
        execution = executor.run(state.parameters, state.buffers, leaves, seed)
    else:
        hooks = state.layout.hooks()
        execution = state.steps.run(executor, state.latest_key, leaves, seed, state.device(), hooks)
    # Most models have none, and entering no_grad takes as long as a small kernel.
    with torch.no_grad() if execution.mutated_buffers else nullcontext():
        for name, value in execution.mutated_buffers.items():
            # In place, since the user's code and copies of the tree refer to this tensor.
            state.buffers[name].copy_(value)
    if state.agreement.every_call:
        state.agreement.settle()  # if no collective of the program has done it before
    return user_outputs(executor.compiled, execution, state.group, state.modules)


def _no_data(missing: Sequence[str], state: ModuleState) -> str:
    """Return the text of an error about tensors on the meta device."""
    in_no_file = [
        name
        for name in missing
        for path, _, own in [name.rpartition(".")]
        if own in state.modules[path]._non_persistent_buffers_set
    ]
    # Loading weights would not help.
    if in_no_file == list(missing):
        others = f", and so for {', '.join(missing[1:4])}" if missing[1:] else ""
        return (
            f"buffer {missing[0]} has no data: the model was built on the meta device, and no file "
            "has a buffer with persistent=False; before the first call compute it as the model's "
            f"constructor does, and assign it: module.{missing[0]} = ...{others}"
        )
    return (
        f"{len(missing)} parameters or buffers have no data ({', '.join(missing[:3])}...): "
        "the model was built on the meta device; call module.load_pretrained(path), "
        "module.load_state_dict(..., assign=True), or module.to_empty(device=...) and fill "
        "them, before the first call"
    )


def require_data(state: ModuleState) -> None:
    """Raise an error while a parameter or a buffer is on the meta device.

    Raises:
        ArgumentError: names the first of them.
    """
    # Checked in every call; tensors that have data keep it.
    if state.has_data:
        return
    if missing := state.without_data():
        raise ArgumentError(_no_data(missing, state))
    state.has_data = True
    # Compares tensors that were on meta when they were placed. Sharded ones differ on the ranks.
    unsharded = {
        name: value
        for name, value in state.parameters.items()
        if not state.layout.placements.get(name, I).is_sharded
    }
    _compare(state, {"parameter": unsharded, "buffer": state.buffers})


def _compare(state: ModuleState, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Compare tensors over the ranks, by kind and name, before they are sharded; each tensor once.

    Raises:
        RankMismatchError: names the tensors that differ.
    """
    if state.group.board is None:
        return
    fresh = {
        f"{kind} {name!r}": local_tensor(value)
        for kind, named in tensors.items()
        for name, value in named.items()
        if f"{kind} {name!r}" not in state.compared
    }
    if not fresh:
        return
    agree_on_weights(
        fresh,
        state.agreement.require_same_model,
        partial(broadcast, group=state.group),
        broadcasts=state.initial_weights == "broadcast",
    )
    # Tensors on meta are compared later, once they have data.
    state.compared.update(name for name, value in fresh.items() if not value.is_meta)


def _compare_over_data(state: ModuleState, placements: Mapping[str, Placement]) -> None:
    """Require the same model and the same placements on ranks with different data, before sharding.

    These ranks compile separately, perhaps for other sizes; gradients of parameters with different
    placements would be averaged regardless.

    Raises:
        RankMismatchError: names the tensors that differ, or parameters whose placements differ.
    """
    if not state.group.data_boards:
        return
    facts = {f"placement of {name!r}": str(where) for name, where in placements.items()}
    agree_on_weights(
        weights_of(state),
        lambda purpose, own: state.agreement.require_equal_over_data(purpose, {**facts, **own}),
        partial(broadcast_over_data, group=state.group),
        broadcasts=state.initial_weights == "broadcast",
    )


def weights_of(state: ModuleState) -> dict[str, Tensor]:
    """Return the parameters and buffers of this rank, by kind and name."""
    named = {"parameter": state.parameters, "buffer": state.buffers}
    return {
        f"{kind} {name!r}": local_tensor(value)
        for kind, values in named.items()
        for name, value in values.items()
    }


def _compile(
    state: ModuleState, leaves: list[Any], structure: pytree.TreeSpec, open_dims: bool
) -> Executor:
    if state.fixed is None:
        _refuse_other_parallelism(state)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    with state.original.awake(state.root, state.computed_as(), state.absent_dtype) as model:
        if state.fixed is None:
            _refuse_empty(state, leaves, input_names(model, args, kwargs))
        with recorded_attributes(model) as reads:
            compiled = state.build(model, args, kwargs, state.kept_placements(), open_dims)
        _note_attributes(state, reads, compiled)
    experts = frozenset(map(compiled.param_name, compiled.program.experts))
    _place(state, compiled.param_placements, experts)
    blocks = frozenset(call.path for call in compiled.program.calls if call.path)
    # Blocks of any program stay: hooks on them run at least in its calls.
    state.layout.blocks = blocks | (state.layout.blocks or frozenset())
    # Until now hooks could be registered anywhere, since the blocks were unknown.
    for module in state.root.modules():
        if isinstance(module, MirrorModule):
            module.require_runnable_hooks()
    return state.executor(compiled)


def _note_attributes(state: ModuleState, reads: AttributeReads, compiled: CompiledProgram) -> None:
    """Add the attributes that a compilation has read to the keys of calls."""
    # By the mirror's paths, under which the user sets attributes: a module may have several.
    mirrors = [m for m in state.root.modules() if isinstance(m, MirrorModule)]
    attributes = state.layout.attributes
    attributes.read({m._sp_path: reads.of(m._sp_original) for m in mirrors})
    paths = {path: vars(module)["_sp_path"] for path, module in state.modules.items()}
    attributes.store((paths[each.path], each.name) for each in compiled.program.stored)


def _refuse_other_parallelism(state: ModuleState) -> None:
    """Raise an error if ``fully_shard`` has sharded parameters that are not placed yet."""
    # Found by its class: its hooks have temporarily restored unsharded parameters in this call.
    if any(isinstance(module, FSDPModule) for module in state.root.modules()):
        raise ArgumentError(
            "fully_shard was applied before the parameters were placed over the tensor-parallel "
            "ranks; pass example_inputs to sp_compiler.compile (or call the module once), and "
            "apply fully_shard afterwards"
        )


def _refuse_empty(state: ModuleState, leaves: list[Any], names: list[str]) -> None:
    """Raise an error if the first batch is empty: no parameter would be sharded for it."""
    tensors = [(n, v) for n, v in zip(names, leaves, strict=True) if isinstance(v, Tensor)]
    if state.group.world_size == 1 or any(value.numel() for _, value in tensors):
        return
    for name, value in tensors:
        raise ArgumentError(
            f"{name} has shape {tuple(value.shape)}, with no elements: the first call decides "
            "how parameters are sharded and needs a batch of the usual size; skip the empty "
            "one, or pass example_inputs to sp_compiler.compile"
        )


def _place(
    state: ModuleState, placements: Mapping[str, Placement], experts: Collection[str]
) -> None:
    """Fix the placements of parameters that have none yet; others must not change.

    Those named in ``experts`` are also divided by experts.
    """
    fixed = dict(state.fixed or {})
    parameters = state.parameters
    # A program for another path through the model may be the first to read some parameters.
    fresh = [name for name in placements if name not in fixed]
    # Compared before each rank has only a part: parts of different weights would go unnoticed.
    if state.fixed is None:
        # Only the first time: ranks with different data may later compile different programs.
        _compare_over_data(state, placements)
    # At first also parameters that this program does not use: FSDP2 shards them, checkpoints have
    # them.
    compared = list(parameters) if state.fixed is None else fresh
    _compare(state, {"parameter": {n: parameters[n] for n in compared}, "buffer": state.buffers})
    for name, kept in (state.kept_placements() or {}).items():
        if placements.get(name, kept) != kept:
            raise ArgumentError(
                f"parameter {name!r} is stored as {kept}, but was compiled as {placements[name]}"
            )
    placed = {id(parameters[name]): placements[name] for name in fresh}
    for name in fresh:
        whole = parameters[name]
        if name not in experts:
            place(whole, placements[name], state.group)
            continue
        part = divided(whole, placements[name], state.group)
        for other in [other for other, value in parameters.items() if value is whole]:
            parameters.replace(other, part)
        placed[id(part)] = placements[name]
    place_optimizer_state([parameters[name] for name in fresh], placed, state.group)
    # Programs use one name of a tied parameter, checkpoints all of them.
    state.layout.placements.update(
        (name, placed[id(parameter)])
        for name, parameter in parameters.items()
        if id(parameter) in placed
    )
    # Last, so that after an error above the parameters can still be given back.
    fixed.update(placements)
    state.fixed = fixed
    state.ties |= {tuple(names) for names in tied_names(parameters)}
