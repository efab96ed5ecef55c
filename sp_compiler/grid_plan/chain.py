"""A compiled program as a chain of calls that can be cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sp_compiler.pipeline_parallel.cutting import ends_of
from sp_compiler.pipeline_parallel.stage_program import chain_of, crossing, loss_of, sent_like
from sp_compiler.planning.data import CallPlan, ParameterSize
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram


@dataclass(frozen=True)
class Chain:
    """Data for the choice of a cut.

    Attributes:
        calls: calls, in order.
        parameters: this rank's part of each parameter, by name.
        activation_bytes: by call, the bytes that a stage sends forward if it ends before that call.
        gradient_bytes: by call, the bytes that it then receives in backward.
        cuts: earlier results without a memory limit, by number of stages.
        rest: plan of the program with ``recompute_rest``, if there is one.
        rest_calls: its calls, as ``calls``.
    """

    calls: Sequence[CallPlan]
    parameters: Mapping[str, ParameterSize]
    activation_bytes: Sequence[int]
    gradient_bytes: Sequence[int]
    cuts: dict[int, list[int]] = field(default_factory=dict)
    rest: Plan | None = None
    rest_calls: Sequence[CallPlan] = ()

    @classmethod
    def of(cls, compiled: PlannedProgram, plan: Plan) -> Chain:
        """Return the chain that :func:`sp_compiler.pipeline` cuts.

        Raises:
            ArgumentError: the model returns no loss.
        """
        loss = loss_of(compiled.program)
        # Without calls that every stage repeats (masks, rotary tables) and calls that the loss does
        # not need.
        numbers = chain_of(compiled.program, loss)
        # The values that each call would receive as a stage of its own.
        position_of = {number: position for position, number in enumerate(numbers)}
        received = crossing(compiled.program, [loss], position_of, len(numbers))
        likes = [[sent_like(compiled, ref) for ref in refs] for refs in received[: len(numbers)]]
        return cls(
            calls=[plan.calls[number] for number in numbers],
            parameters=plan.parameters,
            activation_bytes=[sum(each.nbytes for each in values) for values in likes],
            gradient_bytes=[
                sum(each.nbytes for each in values if each.requires_grad) for values in likes
            ],
            rest=None if compiled.rest is None else compiled.rest.plan,
            rest_calls=[compiled.rest.plan.calls[number] for number in numbers]
            if compiled.rest is not None
            else [],
        )

    @classmethod
    def uncut(cls, plan: Plan) -> Chain:
        """Return the chain of a single stage, which sends nothing."""
        # All calls, including those that a pipeline repeats: a single stage runs each once.
        nothing = [0] * len(plan.calls)
        return cls(plan.calls, plan.parameters, nothing, nothing)

    def ends(self, num_stages: int) -> list[int]:
        """Return where each stage ends without a memory limit; see :func:`ends_of`."""
        if num_stages == 1:
            return [len(self.calls)]
        # Cached, as a search calls this often: cuts depend only on times, not on data axes.
        if num_stages not in self.cuts:
            self.cuts[num_stages] = ends_of(self.calls, self.parameters, [1] * num_stages, None)
        return self.cuts[num_stages]
