"""From a compiled program to its :class:`~sp_compiler.planning.plan.Plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from torch.fx import Graph, Node

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.pass_report import Pass, PassReport
from sp_compiler.base.provenance import module_path
from sp_compiler.base.storage import Storage
from sp_compiler.cost.fused_kernels import fused_bytes
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.model_state import ModelState, StoredParameter, stored_parameters
from sp_compiler.cost.node_cost import (
    Collective,
    collectives_us,
    compute_us,
    elapsed_us,
    merged,
    node_collectives,
    node_flops,
    product_dtype,
)
from sp_compiler.cost.step_memory import Kept, StepMemory, step_memory
from sp_compiler.cost.step_timeline import step_timeline
from sp_compiler.cost.step_walk import SEED_BYTES
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned, SavedTensor
from sp_compiler.ir.fx import tensor_operands
from sp_compiler.ir.op_traits import collective_of, is_view
from sp_compiler.ir.program import Ref, Region
from sp_compiler.ir.text import dtype_name
from sp_compiler.options import CompileOptions
from sp_compiler.planning.call_memory import call_memories
from sp_compiler.planning.costly_fallbacks import costly_fallbacks
from sp_compiler.planning.data import (
    BlockPlan,
    CallPlan,
    KeptTensor,
    ParameterSize,
    Policy,
    Shared,
    Work,
)
from sp_compiler.planning.fallbacks import activations_of, fallbacks, is_attention_core
from sp_compiler.planning.formula import KeptStorage, activation_formula
from sp_compiler.planning.plan import Plan


@without_autocast()
def make_plan(compiled: CompiledProgram, options: CompileOptions, model_name: str = "") -> Plan:
    """Return the plan of ``compiled``, whose ``regions`` must be partitioned."""
    # Memory depends on the whole step (calls share storages, outputs outlive them), so it takes one
    # walk over the step. Time is a sum over distinct blocks.
    memory, device = step_memory(compiled), options.device
    accumulating = step_memory(compiled, accumulates=True)
    kept, sent = (
        {region.name: _kept(compiled, region, memory, items) for region in compiled.program.regions}
        for items in (memory.kept, memory.sent)
    )
    # Inductor fuses operators that other backends run one by one.
    fused = options.fuses
    blocks = tuple(
        _block(compiled, region, kept[region.name], sent[region.name], device, fused=fused)
        for region in compiled.program.regions
    )
    sizes = stored_parameters(compiled.program, compiled.param_placements, compiled.world_size)
    state = ModelState.of(sizes)
    bucket = _gradient_reduction(compiled, sizes)
    work = sum((block.work.times(block.num_calls) for block in blocks), Work())
    # The bucket belongs to no block: it is reduced once, after the last backward.
    work += Work(communication_us=collectives_us(list(bucket), compiled.world_size, device))
    schedule = step_timeline(compiled, memory.timeline, bucket, device, fused=fused)
    # Not the sum over blocks: with recompute prefetch the ends of a run of layers differ.
    hidden_us = work.communication_us - sum(schedule.exposed_us.values())
    return Plan(
        model_name=model_name or "model",
        tp=compiled.world_size,
        options=options.to_dict(),
        hardware=device,
        parameter_bytes=state.parameter_bytes,
        replicated_parameter_bytes=sum(s.num_bytes for s in sizes.values() if s.replicated),
        gradient_bytes=state.gradient_bytes,
        optimizer_bytes=state.optimizer_bytes,
        activation_bytes=memory.kept_bytes,
        activation_peak_bytes=memory.peak_bytes,
        accumulation_bytes=accumulating.peak_bytes - memory.peak_bytes,
        host_bytes=memory.host_bytes,
        returned_bytes=sum(storage.num_bytes for storage in memory.returned),
        blocks=blocks,
        gradient_reduction=bucket,
        work=replace(work, hidden_us=hidden_us),
        fallbacks=tuple(fallbacks(compiled)),
        costly_fallbacks=costly_fallbacks(compiled),
        notes=tuple(
            dict.fromkeys((*_notes(compiled), *_without_effect(compiled, options, memory)))
        ),
        passes=tuple(compiled.reports),
        calls=tuple(_calls(compiled, memory, blocks)),
        parameters=_parameters(compiled, sizes),
        timeline=memory.timeline,
        schedule=schedule,
        # Made on demand: sympy takes tenths of a second, and formulas are rarely read.
        formula_maker=cache(partial(activation_formula, compiled, memory, kept)),
    )


def _parameters(
    compiled: CompiledProgram, sizes: Mapping[str, StoredParameter]
) -> dict[str, ParameterSize]:
    return {
        name: ParameterSize(
            size.numel,
            size.num_bytes,
            size.trained,
            size.shape,
            str(compiled.param_placements[name]),
            name in compiled.program.experts,
        )
        for name, size in sizes.items()
    }


# Blocks.


def _block(
    compiled: CompiledProgram,
    region: Region,
    kept: Sequence[KeptStorage],
    sent: Sequence[KeptStorage],
    device: Hardware,
    *,
    fused: bool,
) -> BlockPlan:
    parts = compiled.regions[region.name].partitioned
    gathered = _gathered_again(parts)
    names = compiled.value_names.get(region.name, {})
    tensors, away = (
        tuple(_tensor(parts.saved[item.position], item, gathered, names) for item in items)
        for items in (kept, sent)
    )
    forward_work = work = _work(parts.forward, compiled.world_size, device, fused=fused)
    backward: tuple[Collective, ...] = ()
    # Consecutive calls may do the same work in another order; most use this one.
    graph = parts.middle_backward
    if graph is not None:
        work += _work(graph, compiled.world_size, device, fused=fused)
        backward = _collectives(graph)
    return BlockPlan(
        name=region.name,
        paths=tuple(compiled.program.paths(region)),
        kept=tensors,
        sent=away,
        forward=_collectives(parts.forward),
        backward=backward,
        work=work,
        forward_us=forward_work.step_us,
    )


def _kept(
    compiled: CompiledProgram, region: Region, memory: StepMemory, saved: Sequence[Kept]
) -> list[KeptStorage]:
    """Return the tensors of ``saved`` that each call of ``region`` saves, by position; those of the
    last call if calls differ."""
    holders: dict[Storage, int] = {}
    for item in memory.kept:
        holders[item.storage] = holders.get(item.storage, 0) + 1
    by_position: dict[int, list[Kept]] = {}
    for item in saved:
        if compiled.program.calls[item.call].region is region:
            by_position.setdefault(item.position, []).append(item)
    storages = []
    for position, items in sorted(by_position.items()):
        shared: Shared = ""
        # `all`: if only one call returns its tensor, the tensors of the others still count.
        if all(item.storage in memory.returned for item in items):
            shared = "returned"
        elif all(holders.get(item.storage, 0) > 1 for item in items):
            shared = "shared"
        storages.append(KeptStorage(position, items[-1].storage, shared))
    return storages


def _gathered_again(parts: Partitioned) -> set[str]:
    """Return names of saved tensors that backward reads only after gathering them from all
    ranks."""
    if parts.step_backward is None:
        return set()
    return {
        node.name
        for node in parts.step_backward.find_nodes(op="placeholder")
        # In the list of saved tensors a shard looks like any other: only its user in backward
        # shows that it is gathered again.
        if any(collective_of(user) == "all_gather" for user in _through_views(node))
    }


def _through_views(node: Node) -> Iterable[Node]:
    for user in node.users:
        yield user
        if is_view(user):
            yield from _through_views(user)


def _tensor(
    saved: SavedTensor, kept: KeptStorage, gathered: Collection[str], names: Mapping[str, str]
) -> KeptTensor:
    reason = "to draw the same dropout masks again" if saved.kind == "seed" else saved.reason
    policy: Policy = "keep the shard" if saved.name in gathered else "keep"
    return KeptTensor(
        name=names.get(saved.name, saved.name),
        module=saved.module,
        line=saved.line,
        op=saved.op,
        shape=saved.shape,
        dtype=dtype_name(saved.dtype),
        num_bytes=SEED_BYTES if saved.kind == "seed" else kept.storage.num_bytes,
        policy="offload" if saved.on_host else policy,
        reason=reason,
        shared=kept.shared,
    )


def _collectives(graph: Graph) -> tuple[Collective, ...]:
    return merged(item for node in graph.nodes for item in node_collectives(node))


def _work(graph: Graph, world_size: int, device: Hardware, *, fused: bool) -> Work:
    total, traffic = Work(), fused_bytes(graph) if fused else None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        model, hardware = node_flops(node)
        recomputed = bool(node.meta.get("recomputed"))
        # Recomputation is not work of the model: MFU counts each of the model's FLOPs once.
        own_flops = 0 if recomputed else model
        time_us = compute_us(node, device, traffic)
        total += Work(
            model_flops=own_flops,
            hardware_flops=hardware,
            compute_us=time_us,
            recompute_us=time_us if recomputed else 0.0,
            communication_us=collectives_us(node_collectives(node), world_size, device),
            ideal_us=own_flops / device.peak_flops_per_us(product_dtype(node))
            if own_flops
            else 0.0,
        )
    # Not a sum over nodes: all work between a collective's start and its wait hides it.
    spent_us = elapsed_us(graph, world_size, device, traffic)
    hidden_us = total.compute_us + total.communication_us - spent_us
    return total + Work(hidden_us=hidden_us)


def _calls(
    compiled: CompiledProgram, memory: StepMemory, blocks: Sequence[BlockPlan]
) -> Iterable[CallPlan]:
    block_of = {block.name: block for block in blocks}
    numbers: dict[Storage, int] = {}
    kept: dict[int, dict[int, int]] = {}
    for item in memory.kept:
        # Including tensors that the model returns: a stage returns only the loss, and keeps logits
        # that its backward needs for each microbatch in flight.
        number = numbers.setdefault(item.storage, len(numbers))
        kept.setdefault(item.call, {})[number] = item.storage.num_bytes

    memories = call_memories(compiled)
    for index, call in enumerate(compiled.program.calls):
        names = (compiled.param_name(ref.name) for ref in call.args if ref.kind == "param")
        yield CallPlan(
            block=call.region.name,
            path=call.path,
            parameters=tuple(dict.fromkeys(names)),
            kept=tuple(kept.get(index, {}).items()),
            memory=memories[index],
            step_us=block_of[call.region.name].work.step_us,
            forward_us=block_of[call.region.name].forward_us,
        )


def _gradient_reduction(
    compiled: CompiledProgram, sizes: Mapping[str, StoredParameter]
) -> tuple[Collective, ...]:
    """Return one all-reduce per dtype of the parameters that are stored as I and read as R."""
    buckets: dict[str, int] = {}
    for size in sizes.values():
        if size.reduced and size.trained and compiled.world_size > 1:
            buckets[size.dtype] = buckets.get(size.dtype, 0) + size.num_bytes
    if not buckets:
        return ()
    return (Collective("all_reduce", len(buckets), sum(buckets.values())),)


def _notes(compiled: CompiledProgram) -> Iterator[str]:
    yield from compiled.notes
    yield from _padding_notes(compiled)
    yield from _output_notes(compiled)


def _without_effect(
    compiled: CompiledProgram, options: CompileOptions, memory: StepMemory
) -> Iterator[str]:
    """Yield one line per option that was given and changes nothing, with the reason."""
    # A program without operators has no regions, and no reports of their passes.
    reports: dict[str, PassReport] = {}
    reports |= {name: PassReport(name) for name in (Pass.CHUNK, Pass.ASYNC_TP)}
    reports |= {report.name: report for report in compiled.reports}
    # The kinds are "loss in 2 chunks" and the like.
    chunked = {kind.split()[0] for kind in reports[Pass.CHUNK].kinds}
    for_ranks = {"half_batches": options.half_batches is True, "async_tp": options.async_tp}
    if compiled.world_size == 1:
        for name in [name for name, is_asked in for_ranks.items() if is_asked]:
            yield f"{name}=True changes nothing on one rank, which does not communicate"
    elif options.async_tp and not reports[Pass.ASYNC_TP].rewrites:
        declined = Counter(item.reason for item in reports[Pass.ASYNC_TP].declined)
        no_candidate = "forward has no exposed gather or scatter of rows"
        reason = declined.most_common(1)[0][0] if declined else no_candidate
        yield f"async_tp=True changes nothing here: {reason}"
    if options.offload and not memory.host_bytes:
        yield "offload=True sends nothing to the host: within this budget that would not save time"
    if options.loss_chunks not in ("auto", 1) and "loss" not in chunked:
        yield (
            f"loss_chunks={options.loss_chunks} changes nothing here: no loss head was found whose "
            "logits are wider than their input, and read only by the loss"
        )
    if options.attention_chunks not in ("auto", 1) and "attention" not in chunked:
        yield (
            f"attention_chunks={options.attention_chunks} changes nothing here: no attention with "
            "dropout was found whose scores are at least twice as large as their context"
        )


def _output_notes(compiled: CompiledProgram) -> Iterator[str]:
    """Yield a note if there is nothing to train, for example if forward does not return a loss."""

    def has_gradient(ref: object) -> bool:
        if not isinstance(ref, Ref) or ref.kind != "call":
            return isinstance(ref, Ref) and ref.kind == "param"
        region = compiled.program.calls[ref.index].region
        return compiled.differentiable[region.name][ref.output]

    if not any(map(has_gradient, compiled.program.outputs)):
        yield "none of the model's outputs requires a gradient: there is no backward"


def _padding_notes(compiled: CompiledProgram) -> Iterator[str]:
    """Yield one line per distinct attention core that runs on padded heads."""
    world_size = compiled.world_size
    for region in compiled.program.regions:
        activations = activations_of(region)
        for node in region.module.graph.nodes:
            # From the values and not from the parameters: a weight may be sharded along its other
            # dim, while the other operand of its matmul is padded.
            heads = compiled.paddable.get((region.name, node.meta.get("source", node.name)))
            if heads is None:
                continue
            placements = (x.meta.get("placement") for x in tensor_operands(node))
            is_padded = any(p is not None and p.padding(world_size) for p in placements)
            if is_padded and is_attention_core(node, activations):
                yield (
                    f"attention in {module_path(node) or 'the model'} of {region.name} runs on "
                    f"{world_size * -(-heads // world_size)} heads: its {heads} are not divisible "
                    f"by {world_size} ranks and are padded"
                )
