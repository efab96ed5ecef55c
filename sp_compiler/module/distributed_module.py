"""The module that :func:`sp_compiler.compile` returns."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, NotCompiledError, UnsupportedError
from sp_compiler.base.placement import I, Placement
from sp_compiler.graph_diff.diff import diff
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Ref
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.module.grad_scaler import check_sharded_gradients_first
from sp_compiler.module.module_tree import Invocation, Layout, MirrorModule, fill_mirror
from sp_compiler.module.optimizer_state import show_true_state
from sp_compiler.module.parameters import optimizers_of, place
from sp_compiler.module.pretrained import load_pretrained
from sp_compiler.module.source_model import Original, check_not_taken, move_hooks
from sp_compiler.module.views import NamedTensors, SignedForward, tied_names
from sp_compiler.ops.dropout_counter import draw_seed
from sp_compiler.runtime.call_agreement import CallAgreement
from sp_compiler.runtime.executor import Execution, Executor
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.padding import make_room, without_rank_padding
from sp_compiler.runtime.program_cache import ProgramCache, call_key
from sp_compiler.runtime.rank_checks import CompileAgreement, check_values, checks_enabled
from sp_compiler.runtime.reductions import DeferredGradients, watch_optimizer_steps
from sp_compiler.runtime.region_call import local_tensor, refuse_transforms
from sp_compiler.trace.export import flatten_inputs, input_names

Build = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Placement] | None, bool],
    CompiledProgram,
]
_INSTANCES = itertools.count()
_WHOLE_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(module, "
    "options=StateDictOptions(full_state_dict=True))"
)


class DistributedModule(MirrorModule):
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
    ) -> None:
        check_not_taken(model)
        if group.mesh is not None:
            check_sharded_gradients_first()
        layout = Layout(group)
        super().__init__(model, "", layout)
        fill_mirror(self, model, layout)
        move_hooks(model, self)
        self.__dict__.update(
            _sp_signature=inspect.signature(model.forward),
            _sp_taken=Original(model, self),
            _sp_build=build,
            _sp_options=dict(options or {}),
            _sp_fixed=None,
            _sp_latest=None,
            _sp_loaded=False,
        )
        self._set_up_instance(cache_size)

    def _set_up_instance(self, cache_size: int) -> None:
        """What no two modules share, besides parameters."""
        modules = dict(self.named_modules(remove_duplicate=False))
        group = self._sp_layout.group
        self.__dict__.update(
            _sp_cache=ProgramCache[Executor](cache_size),
            _sp_deferred=DeferredGradients(),
            _sp_calls=CallAgreement(group, self._sp_options),
            _sp_agreement=CompileAgreement(group, str(next(_INSTANCES)), self._sp_options),
            _sp_modules=modules,
            _sp_parameters=NamedTensors(modules, "_parameters"),
            _sp_named_buffers=NamedTensors(modules, "_buffers"),
        )
        if group.mesh is not None:
            show_true_state(self)

    def _sp_stored(self) -> Iterator[tuple[DTensor, Placement, TensorParallelGroup]]:
        """Every distributed parameter with its placement, for checkpoints of optimizers."""
        layout = self._sp_layout
        for name, parameter in self._sp_parameters.items():
            if isinstance(parameter, DTensor):
                yield parameter, layout.placements.get(name, I), layout.group

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output, on every rank.

        Raises:
            ArgumentError: arguments that the model's forward does not take, or the parameters have
                no data yet.
            CaptureError: the model's forward fails, or its control flow depends on data.
            UnsupportedError: called under a transform of ``torch.func`` or forward-mode AD.
            RankMismatchError: the ranks got inputs of different kinds, or other options.
        """
        leaves, structure = flatten_inputs(args, kwargs)
        refuse_transforms((*leaves, *self._sp_parameters.values()))
        leaves = [_whole(leaf) for leaf in leaves]
        executor = self._executor(leaves, structure)
        self._require_data()
        run = executor.run(
            self._sp_parameters, self._sp_named_buffers, leaves, self._seed(executor)
        )
        self._write_back(run)
        return self._outputs(executor.compiled, run)

    forward = SignedForward(_forward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedModule:
        super()._apply(fn, recurse)
        for parameter, placement, group in self._sp_stored():
            make_room(parameter, placement, group.world_size)
        return self

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these example inputs, and place the parameters, without running anything."""
        leaves, structure = flatten_inputs(args, kwargs)
        self._executor([_whole(leaf) for leaf in leaves], structure)

    def load_pretrained(self, path: str | Path) -> list[str]:
        """Fill the parameters from safetensors files, every rank reading its own part of each.

        A module that was built on the meta device gets its memory here, so that no rank ever holds
        a whole model: pass ``example_inputs`` to :func:`sp_compiler.compile` (or call
        :meth:`prepare`), so that placements are known. Before that, whole parameters are read.

        Args:
            path: a ``.safetensors`` file, or a folder as HuggingFace's ``save_pretrained`` writes
                it, with one file or several and an index.

        Returns:
            Names of tensors in the checkpoint that the model does not have.

        Raises:
            ArgumentError: no such file; a parameter is missing in it or has another shape.
        """
        return load_pretrained(self, path)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; parameters that were tied stay so with ``assign`` too."""
        ties = tied_names(self._sp_parameters)
        result = super().load_state_dict(state_dict, strict, assign)
        if assign:
            for first, *others in ties:
                for name in others:
                    self._sp_parameters.replace(name, self._sp_parameters[first])
        return result

    def give_back(self) -> None:
        """Undo the taking over of the model while no parameter is placed; this module is dead then.

        Raises:
            UnsupportedError: parameters are placed already.
        """
        if self._sp_fixed is not None:
            raise UnsupportedError(
                "the parameters are placed for good; build the model anew and load "
                "module.state_dict() into it"
            )
        self._sp_taken.give_back(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Put off the all-reduce of replicated parameters' gradients in backwards inside.

        Such gradients wait on this rank and are reduced together with those of the next backward
        outside, so accumulate all microbatches but the last one in here. ``grad`` of replicated
        parameters does not change meanwhile; an optimizer step before it does raises.
        """
        watch_optimizer_steps(self._sp_deferred, self)
        before, self._sp_deferred.enabled = self._sp_deferred.enabled, True
        try:
            yield
        finally:
            self._sp_deferred.enabled = before

    @property
    def plan(self) -> Any:
        """What the latest compilation will cost; see :func:`sp_compiler.plan`."""
        return self._latest("plan").plan

    @property
    def code(self) -> str:
        """The generated Python text that runs."""
        return self._latest("code").code

    @property
    def stages(self) -> dict[str, Snapshot]:
        """What the latest compilation made of the model, pass by pass.

        ``"export"``: the one graph that was exported; ``"capture"``: the same, normalised and cut
        into regions; ``"shard"``: one rank's part, with collectives; ``"final"``: this with what
        backward recomputes; ``"split"``: forward and backward of each region as they run.
        """
        return self._latest("stages").stages

    def diff(self, before: str, after: str) -> GraphDiff:
        """What changed between two of :attr:`stages`, such as ``"capture"`` and ``"final"``.

        Raises:
            ArgumentError: there is no such stage.
            NotCompiledError: nothing is compiled yet.
        """
        stages = self._latest("diff").stages
        for name in (before, after):
            if name not in stages:
                raise ArgumentError(f"stage {name!r}: expected one of {', '.join(stages)}")
        return diff(stages[before], stages[after])

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not available: raises with advice."""
        raise UnsupportedError(
            "generate() is not supported by a compiled model, which has no key/value cache; call "
            f"the module itself on whole sequences, or load {_WHOLE_STATE}, which all ranks must "
            "call, into a new model and generate with that"
        )

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's method, where it has one.

        Raises:
            UnsupportedError: several ranks and no ``state_dict=`` of whole weights.
        """
        if self._sp_layout.group.communicator.world_size > 1 and kwargs.get("state_dict") is None:
            raise UnsupportedError(
                "save_pretrained() on several ranks needs whole weights: pass state_dict=state, "
                f"where state = {_WHOLE_STATE}, which all ranks must call"
            )
        return super().__getattr__("save_pretrained")(folder, *args, **kwargs)

    def _latest(self, what: str) -> CompiledProgram:
        if self._sp_latest is None:
            raise NotCompiledError(
                f"{what}: nothing is compiled yet; call the module once, or pass example_inputs to "
                "sp_compiler.compile"
            )
        return self._sp_latest

    def _executor(self, leaves: list[Any], structure: pytree.TreeSpec) -> Executor:
        """The program for these inputs, compiled if need be, on all ranks alike."""
        group = self._sp_layout.group
        key = call_key(
            self._sp_modules.values(),
            self._sp_parameters.values(),
            leaves,
            structure,
            self._sp_layout.attributes,
        )
        if checks_enabled():
            check_values(group, "the kind of call", [("", key.digest())])
            check_values(group, "input", [(str(i), leaf) for i, leaf in enumerate(leaves)])
        self._sp_calls.check(key)
        executor = self._sp_cache.get(key, leaves)
        if executor is None:
            if not self._sp_calls.enabled:
                self._sp_agreement.check(key)
            with torch.inference_mode(False):
                open_dims = self._sp_cache.opens(key, leaves)
                executor = self._compile(leaves, structure, open_dims)
            self._sp_cache.put(key, executor, executor.compiled.program.sizes)
        self.__dict__["_sp_latest"] = executor.compiled
        return executor

    def _compile(self, leaves: list[Any], structure: pytree.TreeSpec, open_dims: bool) -> Executor:
        self._refuse_optimizer_state()
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        self._sp_taken.check_arguments(args, kwargs)
        with self._sp_taken.awake(self) as model:
            if self._sp_fixed is None:
                self._refuse_empty(leaves, input_names(model, args, kwargs))
            compiled = self._sp_build(model, args, kwargs, self._sp_fixed, open_dims)
        self._place(compiled.param_placements)
        blocks = frozenset(call.path for call in compiled.program.calls if call.path)
        self._sp_layout.blocks = blocks | (self._sp_layout.blocks or frozenset())
        for module in self.modules():
            if isinstance(module, MirrorModule):
                module.require_runnable_hooks()
        return self._new_executor(compiled)

    def _refuse_empty(self, leaves: list[Any], names: list[str]) -> None:
        """Raise for an empty batch that would decide how parameters are sharded: not at all."""
        tensors = [(n, v) for n, v in zip(names, leaves, strict=True) if isinstance(v, Tensor)]
        if self._sp_layout.group.world_size == 1 or any(value.numel() for _, value in tensors):
            return
        for name, value in tensors:
            raise ArgumentError(
                f"{name} has shape {tuple(value.shape)}, with no elements: the first call decides "
                "how parameters are sharded and needs a batch of the usual size; skip the empty "
                "one, or pass example_inputs to sp_compiler.compile"
            )

    def _new_executor(self, compiled: CompiledProgram) -> Executor:
        return Executor(
            compiled, self._sp_layout.group.communicator, self._call_block, self._sp_deferred
        )

    def _require_data(self) -> None:
        """Raise while something is on the meta device."""
        if self._sp_loaded:
            return
        tensors = itertools.chain(self._sp_parameters.items(), self._sp_named_buffers.items())
        missing = [name for name, value in tensors if value.is_meta]
        if missing:
            raise ArgumentError(
                f"{len(missing)} parameters or buffers have no data ({', '.join(missing[:3])}...): "
                "the model was built on the meta device; call module.load_pretrained(path), "
                "module.load_state_dict(..., assign=True), or module.to_empty(device=...) and fill "
                "them, before the first call"
            )
        self.__dict__["_sp_loaded"] = True

    def _refuse_optimizer_state(self) -> None:
        if self._sp_fixed is not None:
            return
        for optimizer, has_state in optimizers_of(self.parameters()):
            if has_state:
                raise ArgumentError(
                    f"{type(optimizer).__name__} has state for parameters that are not placed yet "
                    "(it stepped, or state was loaded, before the first call); pass example_inputs "
                    "to sp_compiler.compile, or call the module once before"
                )

    def _place(self, placements: Mapping[str, Placement]) -> None:
        """Fix the placements of parameters that have none yet; others must stay."""
        group = self._sp_layout.group
        fixed = dict(self._sp_fixed or {})
        parameters = self._sp_parameters
        fresh = [name for name in placements if name not in fixed]
        if checks_enabled():
            check_values(
                group,
                "parameter",
                [(name, local_tensor(parameters[name])) for name in fresh],
            )
        for name in placements:
            if name in fixed and fixed[name] != placements[name]:
                raise ArgumentError(
                    f"parameter {name!r} is stored {fixed[name]}, and was compiled as "
                    f"{placements[name]}"
                )
        placed = {id(parameters[name]): placements[name] for name in fresh}
        for name in fresh:
            place(parameters[name], placements[name], group)
        self._sp_layout.placements.update(
            (name, placed[id(parameter)])
            for name, parameter in parameters.items()
            if id(parameter) in placed
        )
        fixed.update(placements)
        self.__dict__["_sp_fixed"] = fixed

    def _seed(self, executor: Executor) -> Tensor | None:
        """The dropout seed of this forward, the same on all ranks."""
        if not executor.needs_seed:
            return None
        device = next(
            (local_tensor(parameter).device for parameter in self.parameters()), torch.device("cpu")
        )
        seed = draw_seed().to(device)
        group = self._sp_layout.group.process_group
        if group is not None:
            dist.broadcast(seed, group=group, group_src=0)
        return seed

    def _call_block(
        self, path: str, invoke: Callable[..., tuple[Any, ...]], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        outputs = self._sp_modules[path](Invocation(invoke), *values)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @torch.no_grad()
    def _write_back(self, run: Execution) -> None:
        for name, value in run.mutated_buffers.items():
            self._sp_named_buffers[name].copy_(value)

    def _outputs(self, compiled: CompiledProgram, run: Execution) -> Any:
        leaves = [
            self._output(value, compiled.placement(ref)) if isinstance(ref, Ref) else value
            for value, ref in zip(run.outputs, compiled.program.outputs, strict=True)
        ]
        return pytree.tree_unflatten(leaves, compiled.program.out_spec)

    def _output(self, value: Any, placement: Placement) -> Any:
        mesh = self._sp_layout.group.mesh
        if isinstance(value, DTensor):  # the model returns a parameter
            return value if placement.is_sharded else value.to_local()
        if mesh is None or not placement.is_sharded:
            return value
        group = self._sp_layout.group
        sizes = placement.global_shape(tuple(value.shape), group.world_size)
        whole = torch.empty(sizes, device="meta")
        return DTensor.from_local(
            without_rank_padding(value, placement, group.rank, group.world_size),
            mesh,
            [Shard(placement.dim)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A module with its own parameters and the same compiled programs."""
        layout = self._sp_layout
        memo.update((id(item), item) for item in (layout.group, self._sp_latest))
        # What refers to this very instance is made anew below.
        memo.update(
            (id(item), None)
            for item in (self._sp_cache, self._sp_deferred, self._sp_agreement, self._sp_calls)
        )
        result: DistributedModule = super().__deepcopy__(memo)
        result._set_up_instance(self._sp_cache.size)
        result.__dict__["_sp_cache"] = self._sp_cache.mapped(
            lambda executor: result._new_executor(executor.compiled)
        )
        return result


def _whole(leaf: Any) -> Any:
    """A user input as a plain tensor."""
    if not isinstance(leaf, DTensor):
        return leaf
    if any(not placement.is_replicate() for placement in leaf.placements):
        raise ArgumentError(
            f"an input is a DTensor placed {leaf.placements}; inputs must be whole on every rank "
            "(plain tensors, or replicated DTensors)"
        )
    return leaf.to_local()
