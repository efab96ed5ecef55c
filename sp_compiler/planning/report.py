"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from sp_compiler.base.pass_report import report_lines
from sp_compiler.base.units import bytes_text, parse_bytes, time_text
from sp_compiler.ops.registry import Collective
from sp_compiler.planning.data import BlockPlan, KeptTensor, PlanData
from sp_compiler.planning.table_text import table

_MAX_SOURCE = 60


def report(plan: PlanData) -> str:
    """Return totals, blocks (repeated ones once), fallbacks and pass reports."""
    parts = [
        f"{plan.model_name} on {plan.tp} tensor-parallel rank{'s' * (plan.tp > 1)}, "
        f"recompute={plan.options['recompute']}, dropout={plan.options['dropout']}, "
        f"sequence_parallel={plan.options['sequence_parallel']}",
        "Memory of one rank\n" + table(_memory(plan)),
        "One step (forward and backward) of one rank\n" + table(_step(plan)),
        *_budget(plan),
        *(_block(block) for block in plan.blocks),
    ]
    for title, lines in (
        ("Fallbacks", plan.fallbacks),
        ("Costly fallbacks", list(map(str, plan.costly_fallbacks))),
        ("Notes", plan.notes),
    ):
        if lines:
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    if plan.passes:
        title = f"Passes, compiled in {sum(plan.seconds.values()):.2f} s"
        parts.append("\n".join([title, *(f"  {line}" for line in report_lines(plan.passes))]))
    return "\n\n".join(parts)


def _memory(plan: PlanData) -> list[tuple[str, str, str]]:
    replicated = f"{bytes_text(plan.replicated_parameter_bytes)} of them on every rank"
    calls = sum(block.num_calls for block in plan.blocks)
    away = f"of activations; {time_text(plan.schedule.host_wait_us)} of a step wait for copies"
    rows = [
        ("parameters", plan.parameter_bytes, replicated if plan.tp > 1 else ""),
        ("gradients", plan.gradient_bytes, ""),
        ("optimizer", plan.optimizer_bytes, "AdamW, two moments in the parameters' dtypes"),
        ("activations kept", plan.activation_bytes, f"between forward and backward, {calls} calls"),
        ("activation peak", plan.activation_peak_bytes, "with temporaries and their gradients"),
        *([("on the host", plan.host_bytes, away)] if plan.host_bytes else []),
        # Not added to the total: outputs are a part of the peak already.
        ("returned", plan.returned_bytes, "outputs of the model, in the peak"),
        ("total", plan.total_bytes, "parameters, gradients, optimizer, activation peak"),
        ("accumulating", plan.accumulation_bytes, "in addition, if a step adds to gradients"),
    ]
    return [(name, bytes_text(num_bytes), note) for name, num_bytes, note in rows]


def _budget(plan: PlanData) -> Iterable[str]:
    """Return the splits of blocks under a budget."""
    name = "memory_budget" if plan.options["device_memory"] is None else "device_memory"
    if plan.options[name] is None:
        return
    limit = parse_bytes(name, plan.options[name])
    of_device = name == "device_memory"
    used = 100 * (plan.total_bytes if of_device else plan.activation_peak_bytes) / limit
    title = "Device memory" if of_device else "Budget"
    rows = [
        (
            f"{block.num_calls} x {block.name}",
            f"saves {bytes_text(block.kept_bytes)} per call",
            f"recomputes for {time_text(block.work.recompute_us)}",
        )
        for block in plan.blocks
    ]
    yield f"{title} of {bytes_text(limit)}, {used:.1f} % used at the peak\n" + table(rows)


def _step(plan: PlanData) -> list[tuple[str, str]]:
    work, exposed_us = plan.work, plan.schedule.exposed_us
    # A model without matrix products (only norms) has no ratio.
    extra = work.hardware_flops / work.model_flops - 1 if work.model_flops else 0.0
    flops = f"{work.model_flops:.4g} of the model, plus {100 * extra:.1f} % recomputed"
    rows = [
        ("matrix FLOPs", flops),
        (
            "estimated time",
            f"{time_text(plan.step_us)}, MFU {100 * plan.mfu:.1f} %, on {plan.hardware.name}",
        ),
        ("  compute", time_text(work.compute_us)),
        ("  of it recompute", time_text(work.recompute_us)),
        ("  communication", time_text(work.communication_us)),
        ("  of it under compute", time_text(work.hidden_us)),
        (
            "  of it exposed",
            f"{time_text(exposed_us['forward'])} in forward, "
            f"{time_text(exposed_us['backward'])} in backward",
        ),
    ]
    rows += [(f"  {item.kind}", _collective_text(item)) for item in plan.collectives]
    return rows


def _collective_text(item: Collective) -> str:
    return f"{item.count} x, {bytes_text(item.num_bytes)}"


def _block(block: BlockPlan) -> str:
    work = block.work
    paths = [path or "(outside of layers)" for path in block.paths]
    # The first and last paths show which layers are meant.
    if len(paths) > 3:
        paths = [*paths[:2], "...", paths[-1]]
    lines = [
        f"{block.name} x {block.num_calls}: {', '.join(paths)}",
        f"  keeps {bytes_text(block.kept_bytes)} a call, "
        f"{time_text(work.step_us)} estimated, "
        f"{time_text(work.communication_us)} of it communication",
    ]
    for name, collectives in (("forward", block.forward), ("backward", block.backward)):
        if collectives:
            text = "; ".join(f"{item.kind} {_collective_text(item)}" for item in collectives)
            lines.append(f"  {name}: {text}")
    # Modules of the first layer represent those of all layers: the block's paths are above.
    rows = table((_tensor(tensor, block.paths[0]) for tensor in (*block.kept, *block.sent)), "    ")
    return "\n".join([*lines, rows] if rows else lines)


def _tensor(tensor: KeptTensor, path: str) -> tuple[str, ...]:
    shape = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
    note = {
        "": "",
        "shared": ", counted once for all calls",
        "returned": ", returned by the model: not counted",
    }
    # The first line of a statement over several lines is the most informative.
    source = tensor.line.split("\n")[0].strip()
    module = tensor.module.removeprefix(path).removeprefix(".")
    where = " ".join(part for part in (module, tensor.op) if part)
    return (
        tensor.name,
        bytes_text(tensor.num_bytes),
        shape,
        where,
        tensor.reason + note[tensor.shared],
        source if len(source) <= _MAX_SOURCE else f"{source[: _MAX_SOURCE - 3]}...",
    )
