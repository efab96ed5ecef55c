"""The public API: :func:`compile`, :func:`pipeline` and :func:`plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Unpack, overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.base.units import check_seconds, parse_bytes
from sp_compiler.compiler import KeptGraphs, build
from sp_compiler.grid.data_parallel import (
    checked_options,
    checked_stage_options,
    refuse_scalars,
    refuse_with_experts,
)
from sp_compiler.grid_plan.build import grid_plan
from sp_compiler.grid_plan.chain import Chain
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.options import GPUS_PER_NODE, GridOptions, refuse_without_grid
from sp_compiler.grid_plan.sizes import GridSizes, Mesh
from sp_compiler.grid_plan.stage_plan import STATE_BYTES, BytesPerParameter
from sp_compiler.ir.hints import parameters_of, wishes_of
from sp_compiler.module.distributed_module import DistributedModule, given_back_on_failure
from sp_compiler.module.module_tree import mirror_class
from sp_compiler.options import CompileOptions, Options, check_choice, with_options
from sp_compiler.pass_manager.reproduction import reproducible
from sp_compiler.pipeline_parallel.axes import pipeline_axis
from sp_compiler.pipeline_parallel.cutting import check_layers
from sp_compiler.pipeline_parallel.microbatch_recompute import require_memory
from sp_compiler.pipeline_parallel.microbatches import check_weigh
from sp_compiler.pipeline_parallel.pipeline_module import PipelineModule
from sp_compiler.pipeline_parallel.schedules import schedule_of
from sp_compiler.planning.costly_fallbacks import FallbackCheck, refuse_costly
from sp_compiler.planning.larger_batch import with_batch_formulas
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.runtime.group import RANK_TIMEOUT, device_type_of, tensor_parallel_group
from sp_compiler.trace.arguments import ExampleInputs, check_model, checked_inputs
from sp_compiler.verification.proof import prove, prove_rules
from sp_compiler.verification.verify import Step


@with_options
def compile(
    model: nn.Module,
    *,
    tp: int | None = None,
    mesh: DeviceMesh | None = None,
    example_inputs: ExampleInputs | None = None,
    initial_weights: Literal["compare", "broadcast"] = "compare",
    rank_timeout: float = RANK_TIMEOUT.total_seconds(),
    verify: bool = False,
    fsdp: bool | Mapping[str, Any] = True,
    **options: Unpack[Options],
) -> DistributedModule:
    """Turn an unmodified model into a tensor- and sequence-parallel module.

    Call the result like the model, on every rank of the axis "tp" with the same full inputs; it
    returns the model's own output type. It takes over the model's parameters, as DTensors under the
    same names, and the original model then raises an error when it is called. If compilation fails,
    the model is unchanged.

    The first call, or ``example_inputs``, compiles for its input sizes. The first call with other
    sizes compiles again, with all sizes above 1 dynamic. That program serves every later call
    that takes the same path through the model; another path is compiled again, with a warning. With
    a ``memory_budget``, each size is compiled separately.

    Args:
        model: any ``nn.Module`` that ``torch.export`` can capture.
        tp: number of tensor-parallel ranks, which must be the size of the default process group.
        mesh: instead of ``tp``, a mesh with an axis named "tp" and, for data parallelism, any of
            "dp_replicate", "dp_shard" and "ep", which divides experts. Ranks along these get
            different batches (:func:`sp_compiler.data_shard`); gradients are averaged over them.
        example_inputs: (args, kwargs) of a call, to compile and place the parameters now instead of
            at the first call. An optimizer can load its state only after that.
        initial_weights: what to do with the ranks' parameters and buffers at the first use:
            ``"compare"`` them and raise an error if they differ, or ``"broadcast"`` rank 0's.
        rank_timeout: seconds that a rank waits for the others before it raises an error.
        verify: compare every program with the captured model before it runs: each distinct block,
            forward and backward, on simulated ranks with random parameters in float64. Every rank
            does so on its own, and needs memory for a step of the largest block, unsharded.
        fsdp: apply PyTorch's FSDP2 over the data axes of ``mesh``, block by block: ``fully_shard``
            if there is "dp_shard" (HSDP with both axes), else ``replicate``. FSDP2 replaces the
            parameters, so create optimizers after the first call, or pass ``example_inputs``. Pass
            its options as a dict (``mp_policy``, ``offload_policy``, ``reshard_after_forward``,
            ``shard_placement_fn``), or ``False`` to apply it yourself.

    Raises:
        ArgumentError: an invalid argument, no process group of the right size, a model that was
            compiled before, a hint that matches nothing or cannot be satisfied, a budget too small
            (at the first call if there are no ``example_inputs``).
        UnsupportedError: hooks inside the model, or with ``strict`` a costly replicated part.
        CaptureError: the model has control flow that depends on parameters or activations.
        PassError: one of ``passes`` broke the graph; with ``verify``, a pass changed the results;
            or a rule of :func:`sp_compiler.rule` gave wrong results when it was verified at its
            first use.
    """
    check_model(model)
    _check(initial_weights, rank_timeout, verify=verify)
    group = tensor_parallel_group(tp, mesh, device_type_of(model), timedelta(seconds=rank_timeout))
    checked = replace(CompileOptions.of(group.world_size, options), ep=group.data.num_expert_ranks)
    refuse_with_experts(group.data, fsdp, verify=verify)
    wishes_of(checked.hints, parameters_of(model))  # raises before anything is taken over
    if group.data.names:  # the limit does not count what FSDP2 gathers
        checked.refuse_device_memory("data")
    fsdp_options = checked_options(fsdp, group.data, group.world_size)
    if fsdp_options is not None:
        refuse_scalars(model)
        checked = replace(checked, layers_apart=True)
    example = None if example_inputs is None else checked_inputs(model, example_inputs)
    texts = {**checked.texts(), "initial_weights": initial_weights}
    # One check for all sizes, so that each fallback is reported once.
    builder = _Builder(checked, FallbackCheck(checked, group.rank), verify)
    result = mirror_class(DistributedModule, model)(
        model, group, builder, options=texts, initial_weights=initial_weights, fsdp=fsdp_options,
        cuda_graphs=checked.cuda_graphs,
    )  # fmt: skip
    if example is not None:
        with given_back_on_failure(result):
            result.prepare(*example[0], **example[1])
    return result


def _check(initial_weights: str, rank_timeout: float, **switches: bool) -> None:
    check_choice("initial_weights", initial_weights, ("compare", "broadcast"))
    check_seconds("rank_timeout", rank_timeout)
    for name, value in switches.items():
        check_choice(name, value, (True, False))


@with_options
def pipeline(  # noqa: PLR0913 - all by keyword, each described below
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    example_inputs: ExampleInputs,
    microbatches: int,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    memory: int | str | None = None,
    weigh: Callable[..., Tensor | float] | None = None,
    return_outputs: bool = False,
    initial_weights: Literal["compare", "broadcast"] = "compare",
    rank_timeout: float = RANK_TIMEOUT.total_seconds(),
    fsdp: bool | Mapping[str, Any] = True,
    **options: Unpack[Options],
) -> PipelineModule:
    """Divide the layers of an unmodified model among the ranks of a pipeline.

    The model is compiled and cut into stages between the calls of its program, so that the slowest
    stage is as fast as possible. Each stage is tensor- and sequence-parallel as with
    :func:`compile`; stages send each other one rank's part of the activations. Stages and schedules
    are those of ``torch.distributed.pipelining``.

    >>> mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("pp", "tp"))
    >>> pipeline = sp_compiler.pipeline(
    ...     model, mesh=mesh, example_inputs=((), batch), microbatches=8, schedule="1f1b"
    ... )
    >>> optimizer = torch.optim.AdamW(pipeline.parameters())
    >>> loss = pipeline.step(**batch)  # forward and backward of 8 microbatches
    >>> optimizer.step()

    Args:
        model: as for :func:`compile`; its forward returns the loss: the scalar that it calls
            ``loss``, or else the first scalar with a gradient. If it is built on the meta device,
            a rank never holds more than its stages (:meth:`PipelineModule.load_pretrained`).
        mesh: with an axis named "pp", one named "tp" if stages are to be tensor-parallel, and for
            data parallelism any of "dp_replicate", "dp_shard" and "ep", which divides experts:
            ranks along these get different batches (see :func:`sp_compiler.data_shard`).
        example_inputs: (args, kwargs) of one batch of this rank, which is split into microbatches
            along the first dim of the first tensor in the order of forward's parameters.
        microbatches: number of microbatches per step.
        schedule: ``"1f1b"`` (arXiv 2104.04473, section 2.2.1), ``"gpipe"``, ``"interleaved"``
            (section 2.2.2), ``"zero_bubble"`` (ZB1P of arXiv 2401.10241, several stages per rank
            interleaved) or ``"dualpipev"``. The last two compute weight gradients while a stage
            would otherwise wait.
        stages_per_rank: for ``"interleaved"`` (default 2) and ``"zero_bubble"`` (default 1).
        memory: limit per stage, in bytes or as "80GiB", for parameters, gradients, AdamW's moments
            and the activations in flight; ``None`` for no limit.
        weigh: ``weigh(*args, **kwargs)`` returns the weight of a microbatch's loss from its inputs,
            for example the number of labelled tokens; ``None`` weights all microbatches equally.
            Weights are normalized over the data axes too, so that the mean of the losses of all
            parts is the loss of the full batch.
        return_outputs: whether a step returns the model's outputs, as :meth:`PipelineModule.eval`
            does, and holds the logits of the batch, instead of its loss alone.
        initial_weights, rank_timeout: as for :func:`compile`.
        fsdp: options of PyTorch's FSDP2, which is applied over the data axes: ``mp_policy`` and
            ``shard_placement_fn``. The parameters of a stage are gathered at the start of a step
            and stay gathered until its end, when gradients are reduced once for all microbatches.

    Raises:
        ArgumentError: an invalid argument; a mesh without the axis "pp"; a batch that is not
            divisible by ``microbatches``; fewer layers than stages; a model that returns no
            loss; no cut within ``memory``; and as for :func:`compile`.
        UnsupportedError: a mesh axis with an unknown name; and as for :func:`compile`.
    """
    check_model(model)
    _check(initial_weights, rank_timeout, return_outputs=return_outputs)
    check_weigh(weigh)
    timeout = timedelta(seconds=rank_timeout)
    axis = pipeline_axis(mesh, timeout)
    # A schedule that does not fit is rejected before the capture, which takes longest.
    plan, per_rank = schedule_of(schedule, stages_per_rank, axis.size, microbatches)
    args, kwargs = checked_inputs(model, example_inputs)
    group = tensor_parallel_group(None, mesh, rank_timeout=timeout, in_stages=True)
    refuse_with_experts(group.data, fsdp, verify=False)
    fsdp_options = checked_stage_options(fsdp, group.data)
    if fsdp_options is not None:
        refuse_scalars(model)
    checked = replace(
        CompileOptions.of(group.world_size, options, in_stages=True),
        ep=group.data.num_expert_ranks,
        tables_apart=True,  # every stage computes masks and rotary tables by itself
        split_backward=plan.delays_weights,
    )
    checked.refuse_device_memory("pipeline")
    require_memory(checked.recompute_rest, memory)
    wishes_of(checked.hints, parameters_of(model))
    check_layers(model, args, kwargs, axis.size * per_rank)
    builder = _Builder(checked, FallbackCheck(checked, group.rank), verify=False)
    texts = {**checked.texts(), "initial_weights": initial_weights}
    module = mirror_class(DistributedModule, model)(
        model, group, builder, options=texts, initial_weights=initial_weights
    )
    limit = None if memory is None else parse_bytes("memory", memory)
    result = PipelineModule(
        module, axis, plan, per_rank, microbatches, weigh, limit, fsdp_options,
        build_loss=replace(builder, options=replace(checked, loss_only=True)),
        return_outputs=return_outputs,
    )  # fmt: skip
    with given_back_on_failure(module):
        result.prepare(*args, **kwargs)
    return result


@dataclass
class _Builder:
    """Compiles the model of one module for the inputs of a call, and checks the result."""

    options: CompileOptions
    check_fallbacks: FallbackCheck
    verify: bool

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: dict[str, Placement] | None,
        open_dims: bool,
    ) -> PlannedProgram:
        if fixed is None:  # the first compilation, or a retry after a failure
            self.options = replace(self.options, divisible=None)
        # A proof starts from the captured graph, before any of our passes.
        keep: KeptGraphs = "unsharded" if self.verify else "stages"
        compiled = build(
            model, args, kwargs, self.options, fixed=fixed, open_dims=open_dims, keep=keep
        )
        if fixed is None:  # from here on FSDP2 shards all other experts like other parameters
            self.options = replace(self.options, divisible=frozenset(compiled.program.experts))
        self.check_fallbacks(compiled.plan.costly_fallbacks)
        # A user's rule is proven at its first use, with or without ``verify``.
        with reproducible(model, args, kwargs, self.options, fixed or {}, verify=self.verify):
            step = Step.of(model, args, kwargs)
            (prove if self.verify else prove_rules)(step, self.options, compiled)
        return compiled


@overload
def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: int = 8,
    **options: Unpack[Options],
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    mesh: Mesh,
    microbatches: int,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    memory: int | str | None = None,
    bytes_per_parameter: BytesPerParameter = STATE_BYTES,
    gpus_per_node: int = GPUS_PER_NODE,
    **options: Unpack[Options],
) -> GridPlan: ...


@with_options
def plan(  # noqa: PLR0913 - all by keyword, each described below
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: int | None = None,
    *,
    mesh: Mesh | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    memory: int | str | None = None,
    bytes_per_parameter: BytesPerParameter = STATE_BYTES,
    gpus_per_node: int = GPUS_PER_NODE,
    **options: Unpack[Options],
) -> Plan | GridPlan:
    """Return the memory, communication and time of a step of :func:`sp_compiler.compile`'s module.

    Uses only shapes, in one process: it computes nothing, needs no process group, and does not
    change ``model``. Build a model that is too large for this machine under
    ``torch.device("meta")``.

    >>> with torch.device("meta"):
    ...     model = GPT2LMHeadModel(config).bfloat16()
    >>> print(sp_compiler.plan(model, ((), {"input_ids": ids, "labels": ids}), tp=8))

    With ``mesh``, plan a step on that grid, with FSDP2 and the stages that :func:`pipeline` would
    make:

    >>> plan = sp_compiler.plan(model, inputs, mesh="8x35x8", microbatches=280)
    >>> print(plan)  # memory of every stage, traffic on every axis

    Args:
        model: in the mode (train or eval, autocast) to plan for.
        example_inputs: (args, kwargs) of a call, or with ``mesh`` those of one microbatch on one
            rank of the data axes; only the shape and dtype of tensors matter.
        tp: number of tensor-parallel ranks; 8 if neither ``tp`` nor ``mesh`` is given.
        mesh: instead of ``tp``, the sizes of the axes "tp", "pp", "dp_shard", "dp_replicate" and
            "ep": a dict, ``"tp=8,pp=4,dp_shard=16"``, ``"8x35x8"`` for tp x pp x dp_replicate, or a
            ``DeviceMesh``.
        microbatches: number of microbatches per step on each rank of the data axes; needed with
            ``mesh``.
        schedule: the pipeline schedule, as for :func:`pipeline`.
        stages_per_rank, memory: as for :func:`pipeline`.
        bytes_per_parameter: bytes of a trained parameter with its gradient and optimizer state: 18
            for Adam in mixed precision with 32-bit gradients, 16 for everything in float32, 20 if a
            16-bit gradient is kept in addition to the 32-bit sum (arXiv 2201.11990, section 2.1);
            ``"adamw"``: what ``torch.optim.AdamW`` keeps, as in plans without ``mesh``.
        gpus_per_node: devices per node; larger axes communicate over the network between nodes.

    Returns:
        A :class:`Plan`, or with ``mesh`` a :class:`GridPlan`.

    Raises:
        ArgumentError: an invalid argument, or a budget that is too small; with stages, a model that
            returns no loss, or fewer layers than stages.
        UnsupportedError: options that do not work together in this version, hooks inside the model,
            or with ``strict`` a costly replicated part.
        CaptureError: the model has control flow that depends on parameters or activations.
        PassError: one of ``passes`` broke the graph.
    """
    if mesh is not None and (tp is not None or microbatches is None):
        raise ArgumentError(
            f"mesh={mesh!r} with tp={tp!r}, microbatches={microbatches!r}: a grid needs "
            "microbatches=, and takes the size of tp from mesh=; leave out tp="
        )
    of_grid: Any = {
        "microbatches": microbatches,
        "schedule": schedule,
        "stages_per_rank": stages_per_rank,
        "memory": memory,
        "bytes_per_parameter": bytes_per_parameter,
        "gpus_per_node": gpus_per_node,
    }
    if mesh is None:
        refuse_without_grid(**of_grid)
    args, kwargs = checked_inputs(model, example_inputs)
    # 8 ranks: a machine usually has 8 devices with fast links between them.
    grid = GridSizes(8 if tp is None else tp) if mesh is None else GridSizes.of(mesh)
    checked = replace(CompileOptions.of(grid.tp, options, in_stages=grid.pp > 1), ep=grid.ep)
    on_grid = None
    if microbatches is not None:  # raises before the model is captured
        checked.refuse_device_memory("grid")
        on_grid = GridOptions(grid, **of_grid, recompute_rest=checked.recompute_rest)
        scheduled, per_rank = on_grid.stages()
        split, staged = scheduled.delays_weights, grid.pp > 1
        check_layers(model, args, kwargs, grid.pp * per_rank)
        checked = replace(checked, loss_only=staged, tables_apart=staged, split_backward=split)
        checked = replace(checked, layers_apart=grid.data > 1)
    wishes_of(checked.hints, parameters_of(model))
    # Plans are often made in a loop, and nothing of them reads copies of every stage's graphs.
    compiled = build(model, args, kwargs, checked, keep="nothing")
    if checked.strict:
        refuse_costly(compiled.plan.costly_fallbacks, grid.tp)
    if on_grid is None:  # at batch 1 the formulas need a plan of a larger batch, built on demand
        return with_batch_formulas(compiled, args, kwargs, partial(build, model, options=checked))
    chain = Chain.of(compiled, compiled.plan) if grid.pp > 1 else Chain.uncut(compiled.plan)
    return grid_plan(compiled.plan, chain, on_grid)
