"""A sharded graph of ``torch.compile``, called with full parameters on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from sp_compiler.base.decisions import callers_modes_kept
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.state import COMPILING
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.group import TensorParallelGroup, forward_seed
from sp_compiler.runtime.kernels import compile_kernels
from sp_compiler.runtime.keys.call_key import CallKey, call_key
from sp_compiler.runtime.program_cache import ProgramCache
from sp_compiler.runtime.rank_checks import RankAgreement, fingerprints
from sp_compiler.torch_compile.dynamo_graph import BoundInputs, DynamoGraph, GraphIdentity
from sp_compiler.torch_compile.full_parameters import local_parameters
from sp_compiler.trace.environment import without_saved_tensor_hooks

Build = Callable[[nn.Module, Sequence[Tensor]], CompiledProgram]


@dataclass(frozen=True)
class GraphKey(CallKey):
    """A call of one dynamo graph; ``structure`` is its :class:`GraphIdentity`."""

    structure: GraphIdentity

    def parts(self) -> dict[str, str]:
        parts = super().parts()
        # Last: other parts say in words how two graphs differ, if they can. Where sizes have
        # changed, dynamo leaves them open in later calls too.
        del parts["structure"]
        text = f"{self.structure.fingerprint[:12]} (torch._dynamo.reset() discards those captured)"
        graph = {"graph that dynamo captured": text}
        shapes = {f"parameter {name!r}": str(shape) for name, shape in self.structure.shapes}
        return {**shapes, **parts, **graph}

    def describe(self) -> str:
        return f"graph {self.structure.fingerprint[:12]}, {super().describe()}"


@dataclass(frozen=True)
class _Compiled:
    """A program, and the outputs of the graph that are its inputs (position to position)."""

    executor: Executor
    returned_inputs: dict[int, int]


class CompiledGraph:
    """Callable that replaces dynamo's graph; compiles for each new kind of inputs.

    Sizes that dynamo left open are fixed here, and so are numbers that the graph reads from its
    inputs and buffers: there is one program with static shapes per combination, and the least
    recently used ones are dropped.

    Args:
        graph: dynamo's graph.
        group: the ranks on which it runs.
        build: ``build(model, example_inputs)`` compiles; outputs must be replicated.
        options: options of ``build`` by name; they must be the same on every rank.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        group: TensorParallelGroup,
        build: Build,
        options: Mapping[str, str],
    ) -> None:
        self._graph = graph
        self._group = group
        self._build = build
        self._programs = ProgramCache[_Compiled]()
        # Dynamo may capture a graph on one rank alone, whose call is compared with that of another
        # graph: it says what differs.
        self._agreement = RankAgreement(group, "graph", options, numbered=False)

    def __call__(self, *args: Any) -> Any:
        """Return the graph's outputs, replicated; update the buffers that it changes.

        Raises:
            RankMismatchError: the ranks call different graphs, or pass inputs of different kinds.
        """
        self._group.note_call(over_data=False)
        with self._group.reporting(over_data=False):
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        bound = self._graph.bind(args)
        _refuse_distributed(bound)
        compiled = self._compiled(bound)
        executor = compiled.executor
        # In every call, since an optimizer writes the full parameters.
        params = local_parameters(
            self._group.communicator, bound.params, executor.compiled.param_placements
        )
        seed = None
        if executor.needs_seed:
            tensors = (*bound.params.values(), *bound.tensors)
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            seed = forward_seed(self._group, device)
        run = executor.run(params, bound.buffers, bound.tensors, seed)
        with torch.no_grad():
            for name, value in run.mutated_buffers.items():
                # In place, since the model and other graphs refer to the same tensor.
                bound.buffers[name].copy_(value)
        outputs = pytree.tree_unflatten(run.outputs, executor.compiled.program.out_spec)
        # An output that is an input in eager mode is the same object here too.
        returned = compiled.returned_inputs
        return tuple(
            args[returned[index]] if index in returned else out for index, out in enumerate(outputs)
        )

    def _compiled(self, bound: BoundInputs) -> _Compiled:
        """Return the program for these inputs, compiled on all ranks if necessary."""
        params, buffers = bound.params.values(), bound.buffers.values()
        plain = call_key((), params, buffers, bound.values, self._graph.identity)
        # Dynamo may leave numbers (`lengths.max().item()`) and layouts to the graph.
        key = self._programs.decided(GraphKey(**vars(plain)), bound.tensors, bound.buffers)
        compiled = self._programs.get(key)

        # Even if there is a program: other ranks would wait for one that compiles.
        self._agreement.begin_call(
            key, bound.values, self._graph.value_sources, compiled=compiled is not None
        )
        if compiled is None:
            compiled = self._add_program(bound, key)
        return compiled

    def _add_program(self, bound: BoundInputs, key: CallKey) -> _Compiled:
        """Compile for inputs that have no program, and put the program into the cache."""
        # Once per program: ranks with different weights would silently diverge.
        if self._group.board is not None:
            parameters = {f"parameter {name!r}": p for name, p in bound.params.items()}
            self._agreement.require_equal("compares its weights", fingerprints(parameters))
        model = self._graph.as_model(bound)
        # Constants made now outlive the caller's inference_mode.
        with (
            COMPILING,
            callers_modes_kept(),
            torch.inference_mode(False),
            without_saved_tensor_hooks(),
        ):
            try:
                compiled = self._build(model, bound.tensors)
            except UnsupportedError as error:
                raise model.in_dynamos_words(error) from error.__cause__
        # A separate executor, since programs for other sizes save other tensors.
        executor = Executor(compiled, self._group.communicator)
        compile_kernels(self._agreement, compiled)
        decisions = compiled.program.decisions
        key = replace(key, decisions=tuple(map(str, decisions)))
        # Only now it is known what the graph reads.
        self._agreement.require_equal("has compiled", key.parts())
        entry = _Compiled(executor, model.returned_inputs)
        self._programs.put(key, entry, decisions=decisions)
        return entry


def _refuse_distributed(bound: BoundInputs) -> None:
    for name, tensor in bound.params.items():
        if isinstance(tensor, DTensor):
            raise ArgumentError(
                f"parameter {name!r} is a DTensor; torch.compile with this backend takes full "
                "parameters (sp_compiler.compile makes distributed ones)"
            )
