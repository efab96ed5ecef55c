"""Costs of a compiled program on one rank: memory, communication, arithmetic, time, and reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from sp_compiler.base.errors import ArgumentError, expected_one_of
from sp_compiler.base.pass_report import PassReport
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.node_cost import merged
from sp_compiler.cost.step_memory import Moment
from sp_compiler.cost.step_timeline import StepTimeline
from sp_compiler.ops.registry import Collective
from sp_compiler.planning.call_memory import CallMemory
from sp_compiler.planning.costly_fallbacks import CostlyFallback
from sp_compiler.planning.formula import ActivationFormula
from sp_compiler.planning.placement_explanation import Explanation

Shared = Literal["", "shared", "returned"]
Policy = Literal["keep", "keep the shard", "offload"]


@dataclass(frozen=True)
class KeptTensor:
    """One tensor that a call saves for its backward.

    Attributes:
        module: path of the user's module that computes it, "" for inputs of the block.
        line: source line in the user's model, as "file.py:12 code".
        dtype: name of the dtype, such as "bfloat16".
        num_bytes: bytes of its storage on one rank.
        policy: whether backward uses it as it is, gathers it from all ranks again, or fetches it
            from the host (and may then gather it).
        reason: why it is saved.
        shared: "shared" if several calls save the same storage, "returned" if it is an output of
            the model and therefore not counted, else "".
    """

    name: str
    module: str
    line: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    policy: Policy
    reason: str
    shared: Shared = ""


@dataclass(frozen=True)
class Work:
    """Arithmetic and time of one function, or of a step, on one rank.

    Attributes:
        model_flops: FLOPs of the matrix products in the model, without recomputation.
        hardware_flops: FLOPs of all matrix products that run, with recomputation.
        compute_us: estimated time of all kernels.
        recompute_us: part of ``compute_us`` spent on recomputation.
        communication_us: estimated time of collectives.
        hidden_us: part of ``communication_us`` during which kernels run.
        ideal_us: time of ``model_flops`` at the device's peak rate for each dtype.
    """

    model_flops: int = 0
    hardware_flops: int = 0
    compute_us: float = 0.0
    recompute_us: float = 0.0
    communication_us: float = 0.0
    hidden_us: float = 0.0
    ideal_us: float = 0.0

    @property
    def step_us(self) -> float:
        """Estimated time from start to end."""
        # Hidden time is in both sums.
        return self.compute_us + self.communication_us - self.hidden_us

    def __add__(self, other: Work) -> Work:
        return Work(
            self.model_flops + other.model_flops,
            self.hardware_flops + other.hardware_flops,
            self.compute_us + other.compute_us,
            self.recompute_us + other.recompute_us,
            self.communication_us + other.communication_us,
            self.hidden_us + other.hidden_us,
            self.ideal_us + other.ideal_us,
        )

    def times(self, count: float) -> Work:
        """Return the work of ``count`` calls, or of a part of one."""
        return Work(*(value * count for value in asdict(self).values()))


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block, per call.

    Attributes:
        name: name of its class in the generated code.
        paths: layer of each call, "" for code outside of layers.
        kept: tensors that a call saves on the device for its backward.
        forward: collectives of the forward, one entry per kind.
        backward: collectives of the backward, with repeated gathers.
        work: arithmetic and time of forward and backward.
        forward_us: estimated time of the forward, a part of ``work.step_us``.
        sent: tensors that a call saves in the host's memory.
    """

    name: str
    paths: tuple[str, ...]
    kept: tuple[KeptTensor, ...]
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    work: Work
    forward_us: float
    sent: tuple[KeptTensor, ...] = ()

    @property
    def num_calls(self) -> int:
        return len(self.paths)

    @property
    def kept_bytes(self) -> int:
        """Bytes that each call adds, without tensors that calls share or the model returns."""
        # So that blocks add up: shared and returned tensors belong to the step, and are in the
        # plan's totals.
        return sum(tensor.num_bytes for tensor in self.kept if not tensor.shared)


@dataclass(frozen=True)
class ParameterSize:
    """This rank's part of one parameter.

    Attributes:
        shape: of the part.
        placement: "I" if every rank has it in full, "S(0)" if dim 0 is sharded; the legend of
            ``print(plan)`` has the others.
        divided: whether it is a part of experts that are divided over "ep".
    """

    numel: int
    num_bytes: int
    trained: bool
    shape: tuple[int, ...] = ()
    placement: str = "I"
    divided: bool = False


@dataclass(frozen=True)
class CallPlan:
    """One call of a block, in the order of the forward.

    Attributes:
        block: name of its :class:`BlockPlan`.
        path: path of the layer, "" for code outside of layers.
        parameters: names of the parameters that it uses.
        kept: number and bytes of every storage that it saves for its backward; calls that save the
            same storage have the same number.
        memory: bytes that its own functions take while they run.
        step_us: estimated time of forward and backward.
        forward_us: part of ``step_us`` in the forward.
    """

    block: str
    path: str
    parameters: tuple[str, ...]
    kept: tuple[tuple[int, int], ...]
    memory: CallMemory
    step_us: float
    forward_us: float


@dataclass(frozen=True)
class PlanData:
    """Costs of one training step on one rank, without methods to show them.

    Attributes:
        model_name: class of the user's model.
        tp: number of tensor-parallel ranks.
        options: options of the compilation.
        hardware: profile for which times are estimated.
        parameter_bytes: bytes of this rank's part of the parameters that the forward uses.
        replicated_parameter_bytes: part of ``parameter_bytes`` that is the same on every rank.
        gradient_bytes: gradients of trained parameters, in the parameters' dtypes.
        optimizer_bytes: the two moments of ``torch.optim.AdamW``, in the parameters' dtypes.
        activation_bytes: bytes saved between forward and backward: each storage once, without
            parameters, buffers, the user's inputs and the model's outputs.
        activation_peak_bytes: peak during a step of saved activations, values passed between calls,
            values inside a call (see :mod:`sp_compiler.cost.memory`) and gradients of activations.
        accumulation_bytes: by how much ``activation_peak_bytes`` is higher in a step that adds to
            existing gradients, as microbatches after the first do: the gradients of one
            layer's parameters, until they are added. Not in ``total_bytes``.
        returned_bytes: bytes of the model's outputs.
        blocks: distinct blocks in order of first use.
        gradient_reduction: the all-reduces, one per dtype, of replicated parameters' gradients.
        work: arithmetic and time of the step.
        fallbacks: operators and parameters that stay replicated, with the reason.
        costly_fallbacks: fallbacks that take a large share of a step, largest first; see ``strict``
            of :func:`sp_compiler.compile`.
        notes: other remarks for the user.
        passes: the report of each pass, in order.
        explainer: function behind :meth:`sp_compiler.Plan.explain`; ``None`` in an unpickled plan.
        calls: calls of blocks, in the order of the forward.
        parameters: this rank's part of each parameter, by name.
        timeline: peak of bytes during each call, forward and backward.
        schedule: times at which kernels, collectives and copies run in a step.
        host_bytes: bytes of activations in the host's memory between forward and backward.
        formula_maker: derives :attr:`activation_formula` at its first use.
    """

    model_name: str
    tp: int
    options: dict[str, Any]
    hardware: Hardware
    parameter_bytes: int
    replicated_parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    activation_peak_bytes: int
    accumulation_bytes: int
    returned_bytes: int
    blocks: tuple[BlockPlan, ...]
    gradient_reduction: tuple[Collective, ...]
    work: Work
    fallbacks: tuple[str, ...] = ()
    costly_fallbacks: tuple[CostlyFallback, ...] = ()
    notes: tuple[str, ...] = ()
    passes: tuple[PassReport, ...] = ()
    # Not compared, like the formulas below: two plans are equal if their values are.
    explainer: Callable[[str], Explanation] | None = field(default=None, repr=False, compare=False)
    calls: tuple[CallPlan, ...] = ()
    parameters: dict[str, ParameterSize] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    schedule: StepTimeline = field(default=StepTimeline(()), repr=False)
    host_bytes: int = 0
    formula_maker: Callable[[], ActivationFormula] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def activation_formula(self) -> ActivationFormula:
        """Formulas of the bytes saved for backward, of each block and of the model.

        >>> print(plan.activation_formula)

        Derived from the graph at the first access, which takes tenths of a second, or as long as
        the plan itself if a batch of one cannot be told from other sizes of 1, because the model is
        then planned again at a larger batch. At the sizes of this plan the formulas give
        exactly :attr:`activation_bytes` and each block's ``kept_bytes``.
        """
        assert self.formula_maker is not None
        return self.formula_maker()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds of each pass of the compilation, by name."""
        return {report.name: report.seconds for report in self.passes}

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and the peak of activations."""
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        # The peak, not the saved bytes: gradients of activations and temporaries exist at the same
        # time.
        return state + self.activation_peak_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of one step, one entry per kind."""
        # A block's counts and bytes are those of one call.
        of_blocks = [
            Collective(item.kind, item.count * block.num_calls, item.num_bytes * block.num_calls)
            for block in self.blocks
            for item in (*block.forward, *block.backward)
        ]
        return merged([*of_blocks, *self.gradient_reduction])

    @property
    def step_us(self) -> float:
        """Estimated time of forward and backward."""
        return self.work.step_us + self.schedule.host_wait_us

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's FLOPs over the device's peak in the step's time."""
        # Relative to the peak rate, as papers define it, not to the rate used for estimates.
        return self.work.ideal_us / self.step_us if self.step_us else 0.0

    def block(self, name: str) -> BlockPlan:
        """Return the block called ``name``.

        Raises:
            ArgumentError: there is none.
        """
        blocks = {block.name: block for block in self.blocks}
        if name not in blocks:
            raise ArgumentError(f"block {name!r}: {expected_one_of(name, blocks)}")
        return blocks[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, including derived properties."""
        # Before the copy, which must not contain the objects that the formula is derived from.
        formula = self.activation_formula
        blocks = [
            {**asdict(block), "num_calls": block.num_calls, "kept_bytes": block.kept_bytes}
            for block in self.blocks
        ]
        for block in blocks:
            for tensor, text in zip(block["kept"], formula.tensors[block["name"]], strict=True):
                tensor["formula"] = str(text)
        # asdict copies deeply: two of these hold graphs and solvers, and the schedule is long.
        hidden: dict[str, Any] = {
            "explainer": None,
            "formula_maker": None,
            "schedule": StepTimeline(()),
        }
        plain = asdict(replace(self, **hidden))
        plain = {name: value for name, value in plain.items() if name not in hidden}
        return {
            **plain,
            "blocks": blocks,
            "activation_formula": formula.to_dict(),
            "seconds": self.seconds,
            "collectives": [asdict(item) for item in self.collectives],
            "total_bytes": self.total_bytes,
            "step_us": self.step_us,
            "mfu": self.mfu,
            "schedule": self.schedule.to_dict(),
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __getstate__(self) -> dict[str, Any]:
        # Derived now, because its maker holds graphs, which cannot be pickled.
        known = partial(_known, self.activation_formula)
        return {**vars(self), "explainer": None, "formula_maker": known}


def _known(formula: ActivationFormula) -> ActivationFormula:
    return formula
