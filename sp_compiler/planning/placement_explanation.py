"""Explanations of parameters' placements: the result of :meth:`sp_compiler.Plan.explain`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from sp_compiler.base.placement import legend_of
from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.planning.table_text import table

# Smaller differences are rounding errors of the solver.
_SHOWN_US = 0.05


@dataclass(frozen=True)
class Way:
    """One way to store a parameter or to run an operator, with the best choices for everything
    else.

    Times are in us per step, forward and backward, for all layers that share the decision, at the
    plan's nominal number of tokens. They are differences from the chosen way.

    Attributes:
        operands: placements of the operator's tensor operands; () for a way of storing.
        results: placements of the operator's results; for a way of storing, that of the parameter.
        possible: False if the rest of the model is incompatible with it; all times are 0 then.
        more_us: the sum of the three others, never negative, because the chosen way is optimal.
        communication_us: time of collectives and of copies around them.
        compute_us: time of all operators of the model.
        memory_us: price of values that are replicated on every rank.
        parameter_bytes: bytes of the parameter on one rank.
        conversions: conversions that only this way needs, not the chosen one, costliest first.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    chosen: bool
    possible: bool
    more_us: float
    communication_us: float
    compute_us: float
    memory_us: float
    parameter_bytes: int
    conversions: tuple[str, ...]


def cost_text(time_us: float, memory_us: float, num_bytes: int = 0) -> str:
    """Return an extra cost in words. The price of memory is not shown as time.

    Args:
        time_us: extra time of communication and compute.
        memory_us: the price of extra memory.
        num_bytes: the extra bytes, if known.
    """
    parts = []
    if memory_us > 0:
        more = f"{bytes_text(num_bytes)} more" if num_bytes > 0 else "more memory"
        parts.append(f"{more} on every rank")
    if not parts or abs(time_us) >= _SHOWN_US:
        parts.append(f"{time_text(abs(time_us))} {'less' if time_us < 0 else 'more'}")
    return " and ".join(parts)


@dataclass(frozen=True)
class OperatorWays:
    """An operator that reads the parameter.

    Attributes:
        operator: name, module and source line.
        num_calls: number of layers that run it in the same way.
        ways: every strategy that its rule offers here.
    """

    operator: str
    num_calls: int
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class ParameterExplanation:
    """Why one parameter is placed as it is.

    Attributes:
        placement: such as "Shard(0)" or "Replicate()"; "" if the forward does not use it.
        reason: in words.
        stored: every way to store it that all its readers accept.
        operators: the operators that read it.
    """

    name: str
    shape: tuple[int, ...]
    placement: str
    reason: str
    stored: tuple[Way, ...] = ()
    operators: tuple[OperatorWays, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Why a module's parameters are sharded or not; ``print`` shows tables.

    Attributes:
        name: the name that was asked for.
        tp: number of ranks.
        parameters: the parameters that match the name.
    """

    name: str
    tp: int
    parameters: tuple[ParameterExplanation, ...]

    def to_json(self) -> str:
        """All values as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        parts = [_parameter(item, self.tp) for item in self.parameters]
        return "\n".join(["\n\n".join(parts), *legend_of(parts)])


def _parameter(item: ParameterExplanation, tp: int) -> str:
    ranks = f"{tp} rank{'s' * (tp > 1)}"
    lines = [f"{item.name} {item.shape} on {ranks}: {item.placement or 'unused'}"]
    lines.append(f"  {item.reason}")
    if item.stored:
        lines += ["  stored:", _ways(item.stored)]
    for reader in item.operators:
        calls = f", {reader.num_calls} calls" if reader.num_calls > 1 else ""
        lines += [f"  {reader.operator}{calls}:", _ways(reader.ways)]
    return "\n".join(lines)


def _ways(ways: tuple[Way, ...]) -> str:
    head = ("", "way", "communication", "compute", "memory", "bytes", "converts")
    return table([head, *map(_way, ways)], "    ")


def _way(way: Way) -> tuple[str, ...]:
    text = ", ".join(way.results)
    if way.operands:
        text = f"{', '.join(way.operands)} -> {text}"
    mark = "*" if way.chosen else ""
    # No times, because the solver found no solution.
    if not way.possible:
        return (mark, text, "impossible", "", "", "", "")
    times = (way.communication_us, way.compute_us)
    more = f" and {len(way.conversions) - 1} more" if len(way.conversions) > 1 else ""
    converts = way.conversions[0] + more if way.conversions else ""
    numbers = (time_text(time).rjust(10) for time in times)
    memory = "more" if way.memory_us > 0 else "less" if way.memory_us < 0 else ""
    return (mark, text, *numbers, memory, bytes_text(way.parameter_bytes), converts)
