"""The result of a compilation, which the runtime executes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import PassReport
from sp_compiler.base.placement import I, Placement
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.forward_backward import PartitionedRegion
from sp_compiler.ir.program import Program, Ref
from sp_compiler.ir.snapshot import Stages


class RegionCode(Protocol):
    """The compiled form of one distinct region, usually a class in the generated code.

    Tensors are local, with the region's ``input_placements`` and ``output_placements``.
    """

    @property
    def forward(self) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """``forward(tp, *inputs)``: returns the outputs, and the tensors saved for backward."""

    @property
    def backward(self) -> Callable[..., tuple[Tensor | None, ...]]:
        """``backward(tp, saved, *tangents)``: returns one gradient, or ``None``, for each input.

        There is one tangent for each output that requires a gradient, in order.
        """


@dataclass(frozen=True)
class LossBackward:
    """The backward of a region from only the model's loss.

    Attributes:
        output: index of the region's output that is the loss.
        run: ``run(tp, saved, tangent)``, equal to ``backward`` with zeros for the other tangents.
    """

    output: int
    run: Callable[..., tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Reached:
    """From which outputs of a region gradients flow, where it is not from all of them.

    Attributes:
        inputs: by index of an input. If none of its outputs has a gradient, the input has none in
            eager code either.
        functions: line of the model and outputs, for backwards of the user's own that are not
            linear: they do not run if none of these outputs has a gradient.
    """

    inputs: Mapping[int, frozenset[int]] = field(default_factory=dict)
    functions: tuple[tuple[str, frozenset[int]], ...] = ()


class Kernel(Protocol):
    """A function of the generated code that the backend compiles when the program first runs.

    Attributes:
        name: name of the function.
        is_rare: whether the usual training step does not call it.
        before_first_call: called when the function must run and is not compiled; by default
            :meth:`compile`.
    """

    name: str
    is_rare: bool
    before_first_call: Callable[[], object]

    def compile(self) -> str:
        """Compile it if it is not compiled yet; return the reason of a failure, "" for success."""

    def run_as_written(self, reason: str) -> None:
        """Run the generated code uncompiled from now on."""


@dataclass(frozen=True)
class PassedOver:
    """The additional cost of another choice of placements than the chosen one, in us of a step.

    Attributes:
        communication_us: time of collectives and of copies around them.
        compute_us: time of all operators of the model.
        memory_us: cost assigned to values that are replicated on every rank.
    """

    communication_us: float
    compute_us: float
    memory_us: float


@dataclass(eq=False)
class CompiledProgram:
    """A sharded program with the code of its regions.

    Attributes:
        program: calls of regions whose tensors are those of one rank.
        codes: region name to its compiled code.
        param_placements: parameter name to its stored placement, ``I`` or sharded. A region that
            uses an ``I`` parameter as ``R`` returns a partial sum as its gradient.
        world_size: number of tensor-parallel ranks.
        differentiable: region name to whether a gradient flows through each output; by default read
            from the region's graph.
        loss_backwards: name of the region with the model's loss to its backward from only the loss;
            empty if no gradient can flow through its other outputs.
        reached_from: region name to the outputs from which gradients flow.
        notes: fallbacks with reasons.
        kernels: region name to functions that all ranks still have to compile before any runs them.
        replicated: (region, operator) of operators that run replicated because the check rejected
            their shards.
        paddable: (region, operator) of operators that could run with padding, and the number of
            units, such as heads, that would be padded.
        passed_over: (region, operator) of matmuls that run replicated although they could be
            sharded, and the cost of the cheapest way to do so; ``None`` if it was not estimated.
        code: the generated text.
        stages: pass name to the graphs after it.
        regions: region name to its forward and backward.
        reports: one per pass, in order.
        value_names: region name to the names that its nodes have in ``code``.
        unsharded: the captured graph and the outlined program, if a proof needs them.
    """

    program: Program
    codes: dict[str, RegionCode]
    param_placements: dict[str, Placement]
    world_size: int
    differentiable: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    loss_backwards: dict[str, LossBackward] = field(default_factory=dict)
    reached_from: dict[str, Reached] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kernels: Mapping[str, Sequence[Kernel]] = field(default_factory=dict)
    replicated: tuple[tuple[str, str], ...] = ()
    paddable: Mapping[tuple[str, str], int] = field(default_factory=dict)
    passed_over: Mapping[tuple[str, str], PassedOver | None] = field(default_factory=dict)
    code: str = ""
    stages: Stages = field(default_factory=Stages)
    regions: dict[str, PartitionedRegion] = field(default_factory=dict)
    reports: list[PassReport] = field(default_factory=list)
    value_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unsharded: tuple[Captured, Program] | None = None

    def __post_init__(self) -> None:
        for region in self.program.regions:
            if region.name not in self.codes:
                raise ArgumentError(f"no code for region {region.name!r}; have {list(self.codes)}")
            if region.name not in self.differentiable:
                self.differentiable[region.name] = tuple(
                    bool(node.meta.get("requires_grad")) for node in region.outputs
                )

    def placement(self, ref: Ref) -> Placement:
        """Return the placement of the value that ``ref`` refers to."""
        if ref.kind == "call":
            return self.program.calls[ref.index].region.output_placements[ref.output]
        if ref.kind == "param":
            return self.param_placements[self.param_name(ref.name)]
        # Inputs, buffers, constants and the seed are the same on every rank, and so are their
        # gradients, if any.
        return I

    def param_name(self, name: str) -> str:
        """Return the name under which a (possibly tied) parameter is stored."""
        return self.program.aliases.get(name, name)

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add notes that are known only when the ranks first run the program."""
        self.notes += notes
