"""Memory of a model's parameters, their gradients and optimizer, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sp_compiler.base.placement import Placement
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.program import Program

ADAMW_MOMENTS = 2
"""Tensors that ``torch.optim.AdamW`` keeps per trained parameter, in the parameter's own dtype."""


@dataclass(frozen=True)
class StoredParameter:
    """This rank's part of one parameter.

    Attributes:
        num_bytes: bytes of its values, and of its gradient.
        numel: number of elements.
        dtype: as text.
        trained: whether it gets a gradient.
        replicated: whether several ranks hold the same values.
        shape: of this rank's part.
        reduced: whether its gradient is summed over the ranks after the last backward.
    """

    num_bytes: int
    numel: int
    dtype: str
    trained: bool
    replicated: bool
    reduced: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelState:
    """Bytes that a rank holds apart from activations."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @classmethod
    def of(cls, parameters: Mapping[str, StoredParameter]) -> ModelState:
        trained_bytes = sum(each.num_bytes for each in parameters.values() if each.trained)
        return cls(
            sum(each.num_bytes for each in parameters.values()),
            trained_bytes,
            ADAMW_MOMENTS * trained_bytes,
        )

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def stored_parameters(
    program: Program, placements: Mapping[str, Placement], world_size: int
) -> dict[str, StoredParameter]:
    """Return this rank's part of every parameter that the forward uses, by stored name.

    Args:
        program: sharded.
        placements: stored placement of each parameter.
        world_size: number of tensor-parallel ranks.
    """
    sizes: dict[str, StoredParameter] = {}
    for call in program.calls:
        region = call.region
        for node, ref, used in zip(
            region.placeholders, call.args, region.input_placements, strict=True
        ):
            if ref.kind != "param":
                continue
            name, value = program.aliases.get(ref.name, ref.name), node.meta["val"]
            # A tied parameter is used by several calls; one use as R is enough to have it reduced.
            before = sizes.get(name)
            sizes[name] = StoredParameter(
                tensor_bytes(value),
                value.numel(),
                str(value.dtype),
                bool(node.meta.get("requires_grad")),
                # On one rank nothing is redundant.
                placements[name].is_replicated and world_size > 1,
                used.kind == "R" or (before is not None and before.reduced),
                tuple(value.shape),
            )
    return sizes
