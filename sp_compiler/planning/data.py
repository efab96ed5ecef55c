"""Costs of a compiled program on one rank: memory, communication, arithmetic, time, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from sp_compiler.base.pass_report import PassReport
from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.node_cost import merged
from sp_compiler.cost.step_memory import Moment
from sp_compiler.cost.step_timeline import StepTimeline
from sp_compiler.ops.registry import Collective
from sp_compiler.planning.costly_fallbacks import CostlyFallback
from sp_compiler.planning.formula import ActivationFormula
from sp_compiler.planning.placement_explanation import Explanation

Shared = Literal["", "shared", "returned"]
Policy = Literal["keep", "keep the shard"]


@dataclass(frozen=True)
class KeptTensor:
    """One tensor that a call keeps for its backward.

    Attributes:
        module: path of the user's module that made it, "" for inputs of the block.
        line: of the user's model, as "file.py:12 code".
        dtype: such as "bfloat16".
        num_bytes: of its storage on one rank.
        policy: whether backward uses it as it is, or gathers it from all ranks again.
        reason: why it is kept.
        shared: "shared" where several calls keep the same storage, "returned" where it is an output
            of the model and so not counted; else "".
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
        model_flops: of matrix products that the model itself needs.
        hardware_flops: of all matrix products, with those that are recomputed.
        compute_us: estimated time of all kernels.
        recompute_us: the part of ``compute_us`` that recomputes.
        communication_us: estimated time of collectives.
        hidden_us: the part of ``communication_us`` during which kernels run.
        ideal_us: time of ``model_flops`` at the device's peak, each in its own dtype.
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
        """Estimated time from beginning to end."""
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

    def times(self, count: int) -> Work:
        """The work of ``count`` calls."""
        return Work(*(value * count for value in asdict(self).values()))


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block, per call.

    Attributes:
        name: its class in the generated code.
        paths: the layers that it stands for, "" for what is outside of layers; one for each call.
        kept: what a call keeps for its backward.
        forward: collectives of the forward, one entry per kind.
        backward: of the backward, gathers that are repeated included.
        work: of forward and backward.
        forward_us: estimated time of the forward, a part of ``work.step_us``.
    """

    name: str
    paths: tuple[str, ...]
    kept: tuple[KeptTensor, ...]
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    work: Work
    forward_us: float

    @property
    def num_calls(self) -> int:
        return len(self.paths)

    @property
    def kept_bytes(self) -> int:
        """Bytes that each call adds; what calls share or the model returns is left out."""
        # So that blocks add up: what is shared or returned belongs to the step, and is in the
        # plan's totals.
        return sum(tensor.num_bytes for tensor in self.kept if not tensor.shared)


@dataclass(frozen=True)
class ParameterSize:
    """This rank's part of one parameter."""

    numel: int
    num_bytes: int
    trained: bool


@dataclass(frozen=True)
class CallPlan:
    """One call of a block, in the order of the forward.

    Attributes:
        block: name of its :class:`BlockPlan`.
        path: the layer that it stands for, "" for what is outside of layers.
        parameters: names of those that it uses.
        kept: number and bytes of every storage that it keeps for its backward; calls that keep the
            same storage name the same number.
        working_bytes: the most that its forward or its backward makes beside what is kept.
        step_us: estimated time of forward and backward.
        forward_us: the forward's part of it.
    """

    block: str
    path: str
    parameters: tuple[str, ...]
    kept: tuple[tuple[int, int], ...]
    working_bytes: int
    step_us: float
    forward_us: float


@dataclass(frozen=True)
class PlanData:
    """Costs of one training step on one rank, without the ways to show them.

    Attributes:
        model_name: class of the user's model.
        tp: number of tensor-parallel ranks.
        options: those of the compilation.
        hardware: what times are estimated for.
        parameter_bytes: this rank's part of the parameters that the forward uses.
        replicated_parameter_bytes: the part of ``parameter_bytes`` that is the same on every rank.
        gradient_bytes: of parameters that are trained, in their own dtype.
        optimizer_bytes: the two moments of ``torch.optim.AdamW``, in the parameters' own dtypes.
        activation_bytes: kept between forward and backward: each storage once, without parameters,
            buffers, the user's inputs and what the model returns.
        activation_peak_bytes: the most that exists at once in a step of what calls keep, hand on
            and make inside (see :mod:`sp_compiler.cost.memory`), with gradients of activations.
        returned_bytes: of the model's outputs.
        blocks: distinct blocks in order of first use.
        gradient_reduction: the all-reduces, one per dtype, of replicated parameters' gradients.
        work: of the step.
        fallbacks: what runs or is stored replicated, and why.
        costly_fallbacks: those that take a good part of a step, the largest first; see ``strict``
            of :func:`sp_compiler.compile`.
        notes: what else to know.
        passes: what each pass did, in order.
        explainer: what :meth:`sp_compiler.Plan.explain` calls; a plan that was pickled has none.
        calls: of blocks, in the order of the forward.
        parameters: this rank's part of each, by name.
        timeline: the most that exists while each call runs, forward and backward.
        schedule: when kernels and collectives run in a step.
        formula_maker: what derives :attr:`activation_formula` when it is first asked for.
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
    returned_bytes: int
    blocks: tuple[BlockPlan, ...]
    gradient_reduction: tuple[Collective, ...]
    work: Work
    fallbacks: tuple[str, ...] = ()
    costly_fallbacks: tuple[CostlyFallback, ...] = ()
    notes: tuple[str, ...] = ()
    passes: tuple[PassReport, ...] = ()
    # Not compared, as the formulas below: two plans are equal when their figures are.
    explainer: Callable[[str], Explanation] | None = field(default=None, repr=False, compare=False)
    calls: tuple[CallPlan, ...] = ()
    parameters: dict[str, ParameterSize] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()
    schedule: StepTimeline = field(default=StepTimeline(()), repr=False)
    formula_maker: Callable[[], ActivationFormula] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def activation_formula(self) -> ActivationFormula:
        """Bytes kept for backward in symbols: of each block and of the whole model.

        >>> print(plan.activation_formula)

        Derived from the graph when it is first asked for, which takes tenths of a second. At the
        sizes of this plan it gives exactly :attr:`activation_bytes` and each block's
        ``kept_bytes``.
        """
        assert self.formula_maker is not None
        return self.formula_maker()

    @property
    def seconds(self) -> dict[str, float]:
        """Spent in each pass of the compilation."""
        return {report.name: report.seconds for report in self.passes}

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients, optimizer and the activations' peak."""
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        # The peak, not what is kept: gradients of activations and temporaries exist at the same
        # time.
        return state + self.activation_peak_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of one step, one entry per kind."""
        # A block's figures are those of one call.
        of_blocks = [
            Collective(item.kind, item.count * block.num_calls, item.num_bytes * block.num_calls)
            for block in self.blocks
            for item in (*block.forward, *block.backward)
        ]
        return merged([*of_blocks, *self.gradient_reduction])

    @property
    def step_us(self) -> float:
        """Estimated time of forward and backward."""
        return self.work.step_us

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the accelerator's peak, by the model's own FLOPs."""
        # Of the peak and not of the rate that times are estimated with: as papers define it.
        return self.work.ideal_us / self.step_us if self.step_us else 0.0

    def block(self, name: str) -> BlockPlan:
        """The block called ``name``; raises ``KeyError``."""
        return {block.name: block for block in self.blocks}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with what the properties derive."""
        # Before the copy: it is made from what the copy must not have.
        formula = self.activation_formula
        blocks = [
            {**asdict(block), "num_calls": block.num_calls, "kept_bytes": block.kept_bytes}
            for block in self.blocks
        ]
        for block in blocks:
            for tensor, text in zip(block["kept"], formula.tensors[block["name"]], strict=True):
                tensor["formula"] = str(text)
        # asdict copies deeply, and these two hold graphs and solvers; the schedule is a trace's.
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
        # What derives it holds graphs, which cannot be pickled: it is derived now.
        known = partial(_known, self.activation_formula)
        return {**vars(self), "explainer": None, "formula_maker": known}


def _known(formula: ActivationFormula) -> ActivationFormula:
    return formula
