"""A limit for device memory: the budget that is left for activations, and whether a step fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.base.units import bytes_text
from sp_compiler.cost.model_state import ModelState, stored_parameters
from sp_compiler.ir.program import Program
from sp_compiler.options import CompileOptions
from sp_compiler.planning.data import PlanData


def within_device(
    options: CompileOptions, program: Program, placements: Mapping[str, Placement]
) -> tuple[CompileOptions, int]:
    """Return ``options`` with the budget that ``device_memory`` leaves for activations, and the
    bytes of the state; 0 without ``device_memory``.

    Only ``recompute="auto"`` uses a budget; for other policies :func:`require_fit` checks the plan.

    Raises:
        ArgumentError: parameters, gradients and optimizer state leave no memory.
    """
    if options.device_bytes is None:
        return options, 0
    state = ModelState.of(stored_parameters(program, placements, options.tp))
    if options.recompute != "auto":
        return options, state.total_bytes
    left_bytes = options.device_bytes - state.total_bytes
    if left_bytes <= 0:
        # One byte more than is missing, because a budget has to be positive.
        raise ArgumentError(
            f"{_limit(options.device_bytes)}: without any activations a step needs "
            f"{bytes_text(1 - left_bytes)} more: {_state_text(state)}. {_LESS_STATE}"
        )
    # From here on it is like a budget of the user's: the solver handles only activations.
    return replace(options, memory_budget=left_bytes, device_memory=None), state.total_bytes


def require_fit(plan: PlanData, options: CompileOptions) -> None:
    """Raise :class:`ArgumentError` if a step needs more than ``device_memory``."""
    limit = options.device_bytes
    if limit is None or plan.total_bytes <= limit:
        return
    state = ModelState(plan.parameter_bytes, plan.gradient_bytes, plan.optimizer_bytes)
    if state.total_bytes < limit:
        advice = _fewer_activations(options.recompute)
    else:
        state_text = bytes_text(state.total_bytes)
        advice = f"Recomputation cannot reduce {state_text} of it. {_LESS_STATE}"
    # The plan of the same step without a limit may have a higher peak.
    least = (
        " (with more memory, overlap would use more)" if options.overlap and options.tp > 1 else ""
    )
    raise ArgumentError(
        f"{_limit(limit)}: a step needs {bytes_text(plan.total_bytes)}, "
        f"{bytes_text(plan.total_bytes - limit)} more: {_state_text(state)}, activations "
        f"{bytes_text(plan.activation_peak_bytes)} at their peak{least}. {advice}"
    )


def _fewer_activations(recompute: str) -> str:
    """Return what to do if the state alone fits, cheapest first."""
    ways = {
        "auto": 'recompute="auto", which fits activations into what is left',
        "full": 'recompute="full"',
    }
    usable = [] if recompute == "auto" else [way for key, way in ways.items() if key != recompute]
    return f"Use {'; '.join([*usable, 'a smaller batch'])}; or more tensor-parallel ranks"


_LESS_STATE = (
    "Use more tensor-parallel ranks, or also shard the state over data-parallel ranks (a mesh with "
    "the axis dp_shard, which takes a memory_budget instead)"
)


def _limit(num_bytes: int) -> str:
    return f"device_memory={num_bytes} ({bytes_text(num_bytes)})"


def _state_text(state: ModelState) -> str:
    return (
        f"parameters {bytes_text(state.parameter_bytes)}, gradients "
        f"{bytes_text(state.gradient_bytes)}, AdamW's moments {bytes_text(state.optimizer_bytes)}"
    )
