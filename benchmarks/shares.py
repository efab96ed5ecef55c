"""Shares of a model that the compiler shards: matrix products, parameters, saved activations."""

from __future__ import annotations

from sp_compiler.cost.node_cost import product_flops, tensor_bytes
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Program


def flops_share(whole: Program, compiled: CompiledProgram) -> float:
    """Of the forward's matrix products in ``whole``, the part that ranks share; 1 where none is."""
    return _share(_flops(whole), _flops(compiled.program), compiled.world_size)


def kept_bytes(compiled: CompiledProgram) -> float:
    """Bytes that calls keep for their backward on one rank."""
    return step_memory(compiled).kept_bytes


def kept_share(compiled: CompiledProgram, alone: float) -> float:
    """Of the ``alone`` bytes that one rank keeps for backward, the part that ranks share."""
    return _share(alone, kept_bytes(compiled), compiled.world_size)


def parameter_share(compiled: CompiledProgram) -> float:
    """Of the bytes of parameters with two dims or more, the part that is sharded."""
    sizes: dict[str, int] = {}
    sharded: set[str] = set()
    for call in compiled.program.calls:
        for node, ref in zip(call.region.placeholders, call.args, strict=True):
            if ref.kind != "param" or node.meta["val"].ndim < 2:
                continue
            name = compiled.param_name(ref.name)
            is_sharded = compiled.param_placements[name].is_sharded
            sizes[name] = tensor_bytes(node.meta["val"]) * (
                compiled.world_size if is_sharded else 1
            )
            if is_sharded:
                sharded.add(name)
    total = sum(sizes.values())
    return sum(sizes[name] for name in sharded) / total if total else 1.0


def _share(whole: float, local: float, world_size: int) -> float:
    """The sharded part f of ``whole`` where ``local == whole * (1 - f + f / world_size)``."""
    return (whole - local) / (whole * (1 - 1 / world_size)) if whole else 1.0


def _flops(program: Program) -> float:
    return sum(
        product_flops(node)
        for call in program.calls
        for node in call.region.module.graph.nodes
        if node.op == "call_function"
    )
