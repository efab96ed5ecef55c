"""What share of a model the compiler shards: matrix products, parameters, kept activations."""

from __future__ import annotations

from dataclasses import dataclass

from sp_compiler.compiled import CompiledProgram
from sp_compiler.liveness import step_memory
from sp_compiler.program import Program
from sp_compiler.work import product_flops, tensor_bytes


@dataclass(frozen=True)
class Shares:
    """Parts of one that are sharded; 1 where there is nothing to shard.

    Attributes:
        flops: of the forward's matrix products; a product is sharded as far as a rank does less.
        parameters: of the bytes of parameters of two dims or more.
        kept: of the bytes that calls keep for their backward.
    """

    flops: float
    parameters: float
    kept: float


def shares(whole: Program, compiled: CompiledProgram, alone: CompiledProgram) -> Shares:
    """Shares of ``compiled``.

    Args:
        whole: the program before it was sharded.
        compiled: for several ranks.
        alone: for one rank, with the same options.
    """
    world = compiled.world
    return Shares(
        flops=_share(_flops(whole), _flops(compiled.program), world),
        parameters=_parameters(compiled),
        kept=_share(step_memory(alone).kept_bytes, step_memory(compiled).kept_bytes, world),
    )


def _share(whole: float, local: float, world: int) -> float:
    """The sharded part f of ``whole`` where ``local == whole * (1 - f + f / world)``."""
    return (whole - local) / (whole * (1 - 1 / world)) if whole else 1.0


def _flops(program: Program) -> float:
    return sum(
        product_flops(node)
        for call in program.calls
        for node in call.region.module.graph.nodes
        if node.op == "call_function"
    )


def _parameters(compiled: CompiledProgram) -> float:
    """Local sizes of the parameters, each under the name that it is stored under."""
    sizes: dict[str, int] = {}
    for call in compiled.program.calls:
        for node, ref in zip(call.region.placeholders, call.args, strict=True):
            if ref.kind == "param" and node.meta["val"].ndim >= 2:
                name = compiled.param_name(ref.name)
                parts = compiled.world if compiled.param_placements[name].is_sharded else 1
                sizes[name] = tensor_bytes(node.meta["val"]) * parts
    total = sum(sizes.values())
    sharded = sum(
        size for name, size in sizes.items() if compiled.param_placements[name].is_sharded
    )
    return sharded / total if total else 1.0
