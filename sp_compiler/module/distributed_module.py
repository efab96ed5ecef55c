"""The module that :func:`sp_compiler.compile` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.grid.fully_sharded import without_gradient_sync
from sp_compiler.module.calls import executor_for, require_data, run, shard_over_data
from sp_compiler.module.dtensors.patches import patch_dtensors
from sp_compiler.module.inspection import Inspection
from sp_compiler.module.module_tree import Layout, fill_mirror
from sp_compiler.module.optimizer_state import show_true_state
from sp_compiler.module.outputs import plain_input
from sp_compiler.module.shared_memory import check_memory_apart
from sp_compiler.module.source_model import Original, check_not_taken, generate, move_hooks
from sp_compiler.module.state import COMPILING, Build, ModuleState
from sp_compiler.module.views import SignedForward
from sp_compiler.module.weights import Weights
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import make_room
from sp_compiler.runtime.region_call import refuse_transforms
from sp_compiler.trace.export import flatten_inputs

_NO_EXPORT = (
    "torch.export of a compiled module would keep one rank's part of the weights and "
    "the collectives of this group; export the original model, with the weights of "
    "module.full_state_dict()"
)
_NO_CALL = (
    "the module of a pipeline has the parameters of this rank's stages, and cannot be called: "
    "pipeline.step(...) trains, pipeline.eval(...) and eval_loss(...) evaluate"
)
_NO_DDP = (
    "DistributedDataParallel (also accelerate.prepare(model) and transformers.Trainer, "
    "which use it) would average over ranks that hold different parts of this model, and "
    "give them different data. Train it in your own loop with the same batch on every rank, and "
    "pass only the optimizer and the scheduler to accelerate.prepare; for data parallelism, pass "
    "compile a mesh with an axis dp_replicate (as DistributedDataParallel does) or dp_shard in "
    "addition to tp"
)


@contextlib.contextmanager
def given_back_on_failure(module: DistributedModule) -> Iterator[None]:
    """Context that on failure returns the parameters to the model, unless they are placed."""
    try:
        yield
    except Exception:
        with contextlib.suppress(UnsupportedError):
            module.give_back()
        raise


class DistributedModule(Inspection, Weights):
    """A tensor-parallel model, called like the original and with the same parameter names.

    Parameters are DTensors over the axis "tp" (plain parameters on one rank). They are replicated
    until the first call or :meth:`prepare`, which fixes their placements and shards them in place.
    Every rank of the group must call the module with the same inputs.

    Args:
        model: the original, which is taken over: this module gets its storages, and the model can
            no longer be called.
        group: the ranks on which the module runs.
        build: ``build(model, args, kwargs, fixed_placements, open_dims)`` compiles for these
            inputs. ``model`` can be captured then, but its parameters have no data.
            ``fixed_placements`` are the placements that parameters already have, ``None`` the first
            time; ``open_dims`` says whether to leave sizes open, because earlier calls had other
            sizes. Input leaves are numbered as by :func:`sp_compiler.trace.export.flatten_inputs`.
        options: options of ``build`` by name; they must be the same on every rank.
        initial_weights: "compare" the weights of the ranks at the first use, or "broadcast" rank
            0's.
        fsdp: options for FSDP2, which is applied once parameters are placed; ``None`` leaves FSDP2
            to the user.
        cuda_graphs: whether steps are recorded and replayed.

    Raises:
        ArgumentError: the model was compiled before, or an optimizer holds its parameters; on
            several ranks, a parameter shares memory with another one or with a buffer.
    """

    def __init__(
        self,
        model: nn.Module,
        group: TensorParallelGroup,
        build: Build,
        options: Mapping[str, str] | None = None,
        initial_weights: str = "compare",
        fsdp: Mapping[str, Any] | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        # All checks come before the first storage is taken over.
        check_not_taken(model)
        if group.mesh is not None:
            check_memory_apart(model)
        # FSDP makes DTensors without "tp" too.
        if group.mesh is not None or group.data.mesh is not None:
            patch_dtensors()
        layout = Layout(group)
        super().__init__(model, "", layout)
        fill_mirror(self, model, layout)
        move_hooks(model, self)
        original = Original(model, self)
        state = ModuleState(self, original, build, options or {}, initial_weights)
        state.fsdp_options = fsdp
        state.replays_steps(enabled=cuda_graphs)
        self._attach(state)

    def _attach(self, state: ModuleState) -> None:
        # Not by __setattr__, which sets attributes on the model.
        self.__dict__["_sp_state"] = state
        if state.group.mesh is not None:
            show_true_state(self)

    @torch.compiler.disable(  # one opaque call: torch.compile could not improve the inside
        reason="a module of sp_compiler runs code that is compiled already"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward` and the hooks; an error on this rank is raised on all ranks."""
        if torch.compiler.is_exporting():
            with COMPILING:  # otherwise it may be the capture of another thread
                if torch.compiler.is_exporting():
                    raise UnsupportedError(_NO_EXPORT)
        if torch.jit.is_tracing():
            self.__prepare_scriptable__()
        if not self._sp_state.layout.calls_root:
            raise UnsupportedError(_NO_CALL)
        if self._sp_state.fsdp_options is not None:
            # Before this call, so that FSDP's hooks run in it.
            self.prepare(*args, **kwargs)
        group, over_data = self._sp_state.group, self._sp_state.waits_over_data
        group.note_call(over_data=over_data)
        with group.reporting(over_data=over_data):
            self._sp_state.fsdp.warn_of_left_out()
            # Before FSDP's hooks, and at a point where all ranks can continue.
            self._sp_state.fsdp.refuse_nested_backward()
            self._sp_state.fsdp.end_failed_backward()
            if over_data:
                self._sp_state.modes.begin_call(training=self.training)
            self._sp_state.fsdp.free_gathered()
            result = super().__call__(*args, **kwargs)
            if not torch.is_grad_enabled():  # no backward follows
                self._sp_state.fsdp.free_gathered()
            return result

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, on every rank.

        Raises:
            ArgumentError: the model's forward does not take these arguments, or the parameters have
                no data yet.
            CaptureError: the model's forward fails, or its control flow depends on parameters or
                activations.
            UnsupportedError: called under a transform of ``torch.func`` or forward-mode AD.
            RankMismatchError: the ranks got different inputs, have different weights or options, or
                a rank does not call the module.
            RankFailureError: another rank failed.
        """
        state = self._sp_state
        leaves, structure = flatten_inputs(args, kwargs, state.unordered)
        # Before the inputs are read: under a transform they are wrappers without memory.
        refuse_transforms(leaves, state.parameters.current)
        leaves = [plain_input(leaf) for leaf in leaves]
        with COMPILING:
            executor = executor_for(state, leaves, structure)
        require_data(state)
        return run(state, executor, leaves)

    forward = SignedForward(_forward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedModule:
        fsdp = self._sp_state.fsdp
        if fsdp.has_unreduced():
            raise UnsupportedError(
                "the module is converted or moved (module.to) while gradients on a data axis are "
                "deferred by no_sync(), and FSDP2 would not convert them: run the last "
                "microbatch's backward outside of no_sync() first, or drop them with "
                "module.zero_grad()"
            )
        super()._apply(fn, recurse)
        fsdp.follow_dtypes()
        self._sp_state.original.cast_absent(self, fn)
        # Conversions make new local parts, without room for padding at their end.
        for parameter, placement in self._sp_state.stored():
            # FSDP pads its own shards of local parts as needed.
            if parameter.device_mesh.ndim == 1:
                make_room(parameter, placement, self._sp_state.group.world_size)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like ``nn.Module.named_parameters``, with shards even while FSDP2 has gathered parameters
        for a call: an optimizer of the gathered ones, which are copies, would train nothing."""
        # There is no state yet while the model's own __init__ runs, or while the module is copied.
        state = vars(self).get("_sp_state")
        shards = {} if state is None else state.fsdp.shards(search=True)
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, shards.get(id(parameter), parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like ``nn.Module.zero_grad``; also drops unreduced gradients of :meth:`no_sync`."""
        self._sp_state.deferred.pending.clear()
        self._sp_state.fsdp.drop_unreduced()
        if set_to_none:
            for shard in self._sp_state.fsdp.shards().values():
                shard.grad = None
            # Without a walk through the tree, which takes as long as a small layer, and without the
            # lookup of __torch_function__ on each DTensor.
            with torch._C.DisableTorchFunctionSubclass():
                for parameter in self._sp_state.parameters.current():
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Raise an error for DistributedDataParallel (also in Accelerate), which reads this first.

        Raises:
            UnsupportedError: there are several ranks.
        """
        if self._sp_state.group.mesh is None:
            return []
        raise UnsupportedError(_NO_DDP)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these example inputs and place the parameters, without running the model."""
        leaves, structure = flatten_inputs(args, kwargs, self._sp_state.unordered)
        with self._sp_state.group.reporting(over_data=self._sp_state.waits_over_data), COMPILING:
            executor_for(self._sp_state, [plain_input(leaf) for leaf in leaves], structure)
            shard_over_data(self._sp_state)

    def give_back(self) -> None:
        """Return the parameters to the model, after which this module cannot be used.

        Raises:
            UnsupportedError: parameters are already placed.
        """
        if self._sp_state.fixed is not None:
            raise UnsupportedError(
                "the parameters are sharded already; build the model again and load the unsharded "
                "weights from module.full_state_dict() into it"
            )
        self._sp_state.original.give_back(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context whose backwards do not reduce the gradients of replicated parameters.

        Use it to accumulate all microbatches except the last one: the gradients stay on this rank,
        and the next backward outside reduces them together with its own. The gradients of
        parameters that are frozen by then are reduced in the forward before it. Until then ``grad``
        of replicated parameters does not change, and an optimizer step or :func:`clip_grad_norm_`
        raises an error. To discard the gradients, call the module's :meth:`zero_grad`; an
        optimizer's ``zero_grad`` does not know of them. Gradients of parameters that FSDP manages
        are not reduced over any axis, as with its ``set_requires_gradient_sync(False)``.
        """
        with self._sp_state.deferred.enabled_for(self), without_gradient_sync(self):
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method, which runs the compiled forward on growing inputs.

        There is no key/value cache, so every new token recomputes all previous tokens. Sampling
        needs the same state of the random number generator on every rank.

        Raises:
            UnsupportedError: the model has no such method, or the method calls its encoder
                separately.
        """
        return generate(self, self._sp_state.original.model, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """Return a module with copied parameters, without gradients, and the same programs."""
        state = self._sp_state
        # It refers to this instance; a new one is made below.
        memo[id(state)] = None
        # Tensors stored by the last forward are copied without their autograd graph, which cannot
        # be copied.
        for module in (*self.modules(), *state.original.model.modules()):
            for leaf in pytree.tree_leaves(list(vars(module).values())):
                is_stored = isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
                if is_stored and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()
        result: DistributedModule = super().__deepcopy__(memo)
        result._attach(state.copied(result, memo))
        return result
