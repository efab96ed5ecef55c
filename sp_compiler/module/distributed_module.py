"""The module that :func:`sp_compiler.compile` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.grid.fully_sharded import without_gradient_sync
from sp_compiler.module.calls import executor_for, require_data, run, shard_over_data
from sp_compiler.module.dtensor_patches import (
    check_sharded_gradients_first,
    format_as_numbers,
)
from sp_compiler.module.inspection import Inspection
from sp_compiler.module.module_tree import Layout, MirrorModule, fill_mirror
from sp_compiler.module.optimizer_state import show_true_state
from sp_compiler.module.outputs import plain_input
from sp_compiler.module.pretrained import load_pretrained, make_buffers
from sp_compiler.module.saving import full_state_dict
from sp_compiler.module.source_model import Original, check_not_taken, generate, move_hooks
from sp_compiler.module.state import Build, ModuleState
from sp_compiler.module.views import SignedForward, tied_names
from sp_compiler.runtime.group import TensorParallelGroup, device_type_of
from sp_compiler.runtime.padding import make_room
from sp_compiler.runtime.region_call import refuse_transforms
from sp_compiler.trace.export import flatten_inputs

_FULL_STATE = "torch's get_model_state_dict with StateDictOptions(full_state_dict=True)"

_NO_EXPORT = (
    "torch.export of a compiled module would keep one rank's part of the weights and "
    "the collectives of this group; export the original model, with the weights of "
    "module.full_state_dict()"
)
_NO_DDP = (
    "DistributedDataParallel (also accelerate.prepare(model) and transformers.Trainer, "
    "which use it) would average over ranks that hold different parts of this model, and "
    "give each of them other data. Train it in a loop of your own with the same batch on "
    "every rank, give accelerate.prepare the optimizer and the scheduler only; over more "
    "ranks pass compile a mesh with an axis dp_replicate (as DistributedDataParallel does) "
    "or dp_shard beside tp"
)
_NO_SHARDED_SAVE = (
    "save_pretrained() on several ranks needs unsharded weights: pass state_dict=state, "
    f"where state = module.full_state_dict() (or {_FULL_STATE}), which all ranks must "
    "call, and save on rank 0"
)


class DistributedModule(Inspection, MirrorModule):
    """A model that runs tensor-parallel; called like the original, with its parameter names.

    Parameters are DTensors over the axis "tp" (plain ones for one rank). They are replicated until
    the first call (or :meth:`prepare`) decides their placements for good and changes them in place.
    Every rank of the group must call it with the same inputs.

    Args:
        model: taken over: its storages become this module's, and it cannot be called any more.
        group: where it runs.
        build: ``build(model, args, kwargs, fixed_placements, open_dims)`` compiles for these
            inputs, ``model`` being awake for capture and its parameters without data;
            ``fixed_placements`` are those that parameters have already, ``None`` the first time;
            ``open_dims`` says whether other sizes came before, so that sizes should be left open.
            Input leaves are numbered as :func:`sp_compiler.trace.export.flatten_inputs` does.
        cache_size: how many programs are kept.
        options: what ``build`` compiles with, by name; every rank must have the same.
        initial_weights: "compare" them over the ranks at the first use, or "broadcast" rank 0's.
        fsdp: options to apply FSDP2 with once parameters are placed; ``None``: that is the user's.

    Raises:
        ArgumentError: the model was compiled before, or an optimizer holds its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        group: TensorParallelGroup,
        build: Build,
        cache_size: int = 16,
        options: Mapping[str, str] | None = None,
        initial_weights: str = "compare",
        fsdp: Mapping[str, Any] | None = None,
    ) -> None:
        # Everything that may refuse comes before the first storage changes hands.
        check_not_taken(model)
        if group.mesh is not None:
            check_sharded_gradients_first()
            format_as_numbers()
        layout = Layout(group)
        super().__init__(model, "", layout)
        fill_mirror(self, model, layout)
        move_hooks(model, self)
        original = Original(model, self)
        state = ModuleState(self, original, build, options or {}, cache_size, initial_weights)
        state.fsdp_options = fsdp
        self._attach(state)

    def _attach(self, state: ModuleState) -> None:
        # Past the __setattr__ that sets attributes on the model.
        self.__dict__["_sp_state"] = state
        if state.group.mesh is not None:
            show_true_state(self)

    @torch.compiler.disable(  # one opaque call: torch.compile has nothing to gain inside
        reason="a module of sp_compiler runs code that is compiled already"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward` and the hooks; an error on this rank raises on all of them."""
        if torch.compiler.is_exporting():
            raise UnsupportedError(_NO_EXPORT)
        if self._sp_state.fsdp_options is not None:
            # Before this very call, whose hooks are FSDP's then.
            self.prepare(*args, **kwargs)
        board = self._sp_state.group.board
        if board is None:
            return super().__call__(*args, **kwargs)
        # Where no call recorded a graph there is no backward whose errors concern the group.
        board.trains |= torch.is_grad_enabled()
        with board.reporting():
            return super().__call__(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output, on every rank.

        Raises:
            ArgumentError: arguments that the model's forward does not take, or the parameters have
                no data yet.
            CaptureError: the model's forward fails, or its control flow depends on parameters or
                activations.
            UnsupportedError: called under a transform of ``torch.func`` or forward-mode AD.
            RankMismatchError: the ranks got different inputs, have different weights or options, or
                a rank does not call the module.
            RankFailureError: another rank failed.
        """
        state = self._sp_state
        leaves, structure = flatten_inputs(args, kwargs)
        # Before the inputs are read: under a transform they are wrappers without memory.
        refuse_transforms(leaves, state.parameters.current)
        leaves = [plain_input(leaf) for leaf in leaves]
        executor = executor_for(state, leaves, structure)
        require_data(state)
        return run(state, executor, leaves)

    forward = SignedForward(_forward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedModule:
        super()._apply(fn, recurse)
        # What moves parameters makes new local parts, without room for padding behind them.
        for parameter, placement in self._sp_state.stored():
            # FSDP pads its parts of a part as it needs them.
            if parameter.device_mesh.ndim == 1:
                make_room(parameter, placement, self._sp_state.group.world_size)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; what waits since :meth:`no_sync` is dropped too."""
        self._sp_state.deferred.pending.clear()
        self._sp_state.fsdp.drop_unreduced()
        if set_to_none:
            # Without the walk through the tree, which takes as long as a small layer.
            for parameter in self._sp_state.parameters.current():
                parameter.grad = None
        else:
            super().zero_grad(set_to_none)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Asked for by DistributedDataParallel before it does anything; Accelerate uses that too.

        Raises:
            UnsupportedError: there are several ranks.
        """
        if self._sp_state.group.mesh is None:
            return []
        raise UnsupportedError(_NO_DDP)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these example inputs, and place the parameters, without running anything."""
        leaves, structure = flatten_inputs(args, kwargs)
        with self._sp_state.reporting():
            executor_for(self._sp_state, [plain_input(leaf) for leaf in leaves], structure)
            shard_over_data(self._sp_state)

    def load_pretrained(self, path: str | Path, prefix: str = "") -> list[str]:
        """Fill the parameters from safetensors files, every rank reading its own part of each.

        A module that was built on the meta device gets its memory here, so that no rank ever holds
        a whole model: pass ``example_inputs`` to :func:`sp_compiler.compile` (or call
        :meth:`prepare`), so that placements are known. Before that, unsharded parameters are read.

        Args:
            path: a ``.safetensors`` file, or a folder as HuggingFace's ``save_pretrained`` writes
                it, with one file or several and an index.
            prefix: name of the module inside the model whose weights these are, such as
                ``"encoder"`` for an encoder in a wrapper of your own; the names in the files begin
                there. What is outside of it stays as it is.

        Returns:
            Names of tensors in the checkpoint that the model does not have.

        Raises:
            ArgumentError: no such file; no module of the name ``prefix``; a parameter is missing in
                the files or has another shape.
            RankMismatchError: the ranks found different files.
        """
        with self._sp_state.reporting():
            return load_pretrained(self, path, self._sp_state.agreement, prefix)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; parameters that were tied stay so with ``assign`` too.

        Raises:
            ArgumentError: parameters are on the meta device, and ``assign`` is not given.
        """
        parameters = self._sp_state.parameters
        unfilled = [name for name in state_dict if name in parameters and parameters[name].is_meta]
        # torch warns for each that it did nothing.
        if unfilled and not assign:
            raise ArgumentError(
                f"{len(unfilled)} parameters are on the meta device ({', '.join(unfilled[:3])}...) "
                "and have no memory to copy to: pass assign=True, or call "
                "module.load_pretrained(path)"
            )
        # With assign torch puts a new parameter under each name.
        ties = tied_names(parameters)
        result = super().load_state_dict(state_dict, strict, assign)
        for first, *others in ties if assign else ():
            for name in others:
                parameters.replace(name, parameters[first])
        if assign:
            # Tables that no state dict has, on the device that the parameters are on now.
            make_buffers(self, device_type_of(self))
        return result

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's own weights, unsharded, on the CPU of rank 0; ``{}`` on other ranks.

        All ranks must call it; no rank holds more than one unsharded tensor beside rank 0's result,
        which ``torch.save``, ``safetensors`` and the original model's ``load_state_dict`` take:
        ``state = module.full_state_dict()``, then ``if rank == 0: torch.save(state, path)``.

        Raises:
            ArgumentError: the parameters have no data yet.
        """
        state = self._sp_state
        with state.reporting():
            require_data(state)
            state.agreement.require_equal("calls full_state_dict()", {})
            return full_state_dict(self, state.group)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; every rank must call it where a weight is fused, to put it in order."""
        state = self._sp_state
        # Without fused weights nothing has to be exchanged, and ranks may save on their own.
        if all(len(placement.segments) < 2 for _, placement in state.stored()):
            return super().state_dict(*args, **kwargs)
        with state.reporting():
            state.agreement.require_equal("calls state_dict()", {})
            return super().state_dict(*args, **kwargs)

    def give_back(self) -> None:
        """Undo the taking over of the model while no parameter is placed; this module is dead then.

        Raises:
            UnsupportedError: parameters are placed already.
        """
        if self._sp_state.fixed is not None:
            raise UnsupportedError(
                "the parameters are placed for good; build the model anew and load "
                "module.state_dict() into it"
            )
        self._sp_state.original.give_back(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Put off the all-reduce of replicated parameters' gradients in backwards inside.

        Such gradients wait on this rank and are reduced together with those of the next backward
        outside, so accumulate all microbatches but the last one in here. ``grad`` of replicated
        parameters does not change meanwhile; an optimizer step and :func:`clip_grad_norm_` before
        it does raise. To discard what waits call the module's :meth:`zero_grad`: an optimizer's
        ``zero_grad`` sees ``grad`` alone. Where FSDP manages parameters nothing of them is reduced
        over any axis, as after its own ``set_requires_gradient_sync(False)``.
        """
        with self._sp_state.deferred.enabled_for(self), without_gradient_sync(self):
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own method, which calls the compiled forward on ever longer sequences.

        Every token computes all before it once more, for there is no key/value cache. Sampling
        needs the same state of the random generator on every rank.

        Raises:
            UnsupportedError: the model has no such method, or it runs an encoder alone.
        """
        return generate(self, self._sp_state.original.model, args, kwargs)

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's method, where it has one.

        Raises:
            UnsupportedError: several ranks and no ``state_dict=`` of unsharded weights.
        """
        # HuggingFace would take state_dict() itself, one rank's part of each weight.
        if self._sp_state.group.world_size > 1 and kwargs.get("state_dict") is None:
            raise UnsupportedError(_NO_SHARDED_SAVE)
        return super().__getattr__("save_pretrained")(folder, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A module with its own parameters, without gradients, and the same programs."""
        state = self._sp_state
        # The ranks stay where they are; the state refers to this very instance and is made anew.
        memo.update({id(state.group): state.group, id(state): None})
        # Copies of what the last forward stored have no graph behind them, which cannot be copied.
        for module in (*self.modules(), *state.original.model.modules()):
            for leaf in pytree.tree_leaves(list(vars(module).values())):
                if isinstance(leaf, Tensor) and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()
        result: DistributedModule = super().__deepcopy__(memo)
        result._attach(state.copied(result, memo))
        return result
