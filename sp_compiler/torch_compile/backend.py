"""The backend of ``torch.compile(model, backend="sp_compiler", options={"tp": 8})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from sp_compiler.base.errors import ArgumentError, SPCompilerError, expected_one_of
from sp_compiler.base.units import check_seconds
from sp_compiler.base.warn import warn
from sp_compiler.compiler import build
from sp_compiler.ir.hints import Parameters, parameters_of, unmatched
from sp_compiler.options import CompileOptions, Options
from sp_compiler.planning.costly_fallbacks import FallbackCheck
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.runtime.group import RANK_TIMEOUT, TensorParallelGroup, tensor_parallel_group
from sp_compiler.runtime.mesh_axes import refuse_expert_axis
from sp_compiler.torch_compile.compiled_graph import CompiledGraph
from sp_compiler.torch_compile.dynamo_graph import DynamoGraph

_OPTIONS = ("tp", *Options.__annotations__, "mesh", "rank_timeout")


def sp_compiler_backend(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Return a function that compiles a graph of dynamo at its first call, and raises all errors.

    Parameters remain the user's own, full on every rank; the compiled graph reads its shards and
    gives every parameter its full gradient, the same on all ranks. All ranks must call the model
    with the same inputs. With ``tp=1``, the default, it only recomputes activations.

    Args:
        module: torch-level graph with parameters and buffers as inputs.
        example_inputs: inputs for which dynamo captured it.
        options: options of :func:`sp_compiler.compile`, except that outputs are always replicated;
            hints that match nothing in this graph cause a warning and are ignored.
        mode: not supported.

    Raises:
        ArgumentError: at the first call, for unknown options, invalid values, or if there is no
            process group of the right size.
        UnsupportedError: at the first call with ``strict``, if a costly part of the graph is
            replicated.
    """
    try:
        compile_options, group = _parse(options or {}, mode, _device_type(example_inputs))
        graph = DynamoGraph.of(module, example_inputs)
    except SPCompilerError as error:
        # If it were raised here, torch would wrap it in its own error, unlike those of later calls.
        return partial(_raise, error)

    # One object for all sizes, so that it warns once.
    check_fallbacks = FallbackCheck(compile_options, group.rank)

    def compile_for(model: nn.Module, tensors: Sequence[Tensor]) -> PlannedProgram:
        own_options = _with_own_hints(compile_options, parameters_of(model))
        compiled = build(model, tensors, {}, own_options)
        check_fallbacks(compiled.plan.costly_fallbacks)
        return compiled

    return CompiledGraph(graph, group, compile_for, compile_options.texts())


def _with_own_hints(options: CompileOptions, parameters: Parameters) -> CompileOptions:
    """Return options without hints that match nothing in this graph; they may match in another
    graph of the model."""
    # A graph break makes several graphs of one model, each with some of its parameters.
    missing = unmatched(options.hints, parameters)
    if missing:
        warn(
            f"hints for {', '.join(map(repr, missing))} match nothing in this graph, whose "
            f"parameters are {', '.join(list(parameters)[:8]) or 'none'}..."
        )
    kept = {key: hint for key, hint in options.hints.items() if key not in missing}
    return dataclasses.replace(options, hints=kept)


def _raise(error: SPCompilerError, *_: Any) -> NoReturn:
    raise error


def _parse(
    given: Mapping[str, Any], mode: str | None, device_type: str
) -> tuple[CompileOptions, TensorParallelGroup]:
    if mode is not None:
        raise ArgumentError(f'mode={mode!r}: backend "sp_compiler" has no modes; pass options=')
    if not isinstance(given, Mapping):
        raise ArgumentError(f'options={given!r}: expected a dict of options, such as {{"tp": 8}}')
    options = dict(given)
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ArgumentError(
            f"options={{{', '.join(f'{name!r}: ...' for name in unknown)}}}: "
            f"{expected_one_of(unknown[0], _OPTIONS)}"
        )
    # Code after a graph break runs eagerly, and treats these outputs as ordinary tensors.
    if options.get("outputs", "replicate") != "replicate":
        raise ArgumentError(
            f"outputs={options['outputs']!r}: torch.compile needs replicated outputs; expected "
            "'replicate' (sp_compiler.compile can return sharded ones)"
        )
    mesh: DeviceMesh | None = options.pop("mesh", None)
    rank_timeout = options.pop("rank_timeout", RANK_TIMEOUT.total_seconds())
    check_seconds("rank_timeout", rank_timeout)
    tp = options.pop("tp", 1 if mesh is None else None)
    values: Any = {**options, "outputs": "replicate"}
    checked = CompileOptions.of(1 if tp is None else tp, values)
    if checked.cuda_graphs:
        raise ArgumentError(
            "cuda_graphs=True: torch.compile calls the compiled graphs, without recording them; "
            "use sp_compiler.compile, or leave it out"
        )
    if checked.tp > 1:
        checked.refuse_device_memory("backend")
    refuse_expert_axis(mesh)
    timeout = timedelta(seconds=rank_timeout)
    group = tensor_parallel_group(tp, mesh, device_type, timeout, of_graph=True)
    return dataclasses.replace(checked, tp=group.world_size), group


def _device_type(example_inputs: Sequence[Any]) -> str:
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    # Parameters first: a forward may move its inputs to their device.
    parameters = [value for value in tensors if isinstance(value, nn.Parameter)]
    return next((tensor.device.type for tensor in (*parameters, *tensors)), "cpu")
