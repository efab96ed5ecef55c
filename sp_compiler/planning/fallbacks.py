"""What is stored or run unsharded on every rank, and why; slower than it could be, never wrong.

Read off the sharded program, not recorded while it was sharded: what was chosen is in the
placements of its nodes, also for what the check refused later and for the regions that a budget
multiplies, and finding a rule again is a look into a table (1 to 2 ms for a GPT or a Llama).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from sp_compiler.base.provenance import module_path
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import arguments, carries_gradient, tensor_operands
from sp_compiler.ir.op_traits import MATMULS, is_view
from sp_compiler.ir.program import Region
from sp_compiler.rules.table import rule_for
from sp_compiler.rules.vocabulary import has_vocabulary, vocabulary_obstacle
from sp_compiler.trace.autograd_functions import function_name

_FUNCTION = torch.ops.sp_compiler_function.apply.default
_PRODUCTS = frozenset(
    {*MATMULS, torch.ops.aten.matmul.default, torch.ops.aten.scaled_dot_product_attention.default}
)


def fallbacks(compiled: CompiledProgram) -> Iterator[str]:
    """One line each, parameters first; nothing for one rank."""
    if compiled.world_size == 1:
        return
    yield from _parameters(compiled)
    for region in compiled.program.regions:
        yield from _operators(region, compiled.world_size)


def _parameters(compiled: CompiledProgram) -> Iterator[str]:
    """Parameters of two dims or more that every rank holds whole."""
    lines: dict[str, list[str]] = {}
    seen: set[str] = set()
    for call in compiled.program.calls:
        for node, ref in zip(call.region.placeholders, call.args, strict=True):
            if ref.kind != "param" or len(node.meta["val"].shape) < 2:
                continue
            name = compiled.param_name(ref.name)
            if name in seen or compiled.param_placements[name].is_sharded:
                continue
            seen.add(name)
            shape = "x".join(map(str, node.meta["val"].shape))
            wish = compiled.program.wishes.get(name)
            asked = str(wish) if wish and not any(wish.allowed[1:]) else ""
            lines.setdefault(f"({shape}) {asked or _why(node, compiled.world_size)}", []).append(
                name
            )
    for reason, names in lines.items():
        others = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        yield f"parameter {names[0]}{others} is replicated: {reason}"


def _why(node: Node, world_size: int) -> str:
    shape = node.meta["val"].shape
    if all(size % world_size for size in shape):
        return f"no dim divides by {world_size}, nor does padding one pay"
    for user in node.users:
        if user.op == "call_function" and _has_no_rule(user):
            return f"no sharding rule for {user.target}"
    if any(user.target in _PRODUCTS and _is_whole(user) for user in node.users):
        return "what it is multiplied with is whole on every rank"
    size = math.prod(shape)
    return f"sharding its {size} elements costs more time than it saves memory"


def _operators(region: Region, world_size: int) -> Iterator[str]:
    """Operators on activations without a rule, and matrix products of whole factors."""
    lines: dict[str, int] = {}
    active = _active(region)
    for node in region.module.graph.nodes:
        if node.op != "call_function" or node not in active or is_view(node):
            continue
        where = f"{node.target} in {module_path(node) or '(model)'} of {region.name}"
        if _has_no_rule(node):
            line = f"{where} runs whole on every rank: {_why_no_rule(node)}"
        elif node.target in _PRODUCTS and _is_whole(node):
            factors = tensor_operands(node)[:2]
            shapes = " x ".join(str(tuple(factor.meta["val"].shape)) for factor in factors)
            line = (
                f"{where} runs whole on every rank: no way to shard {shapes} "
                f"over {world_size} ranks divides, or none pays"
            )
        else:
            continue
        lines[line] = lines.get(line, 0) + 1
    for line, count in lines.items():
        yield line if count == 1 else f"{line} (x {count})"


def _has_no_rule(node: Node) -> bool:
    if getattr(node.target, "namespace", "sp_compiler") == "sp_compiler":
        return False
    return rule_for(node) is None


def _why_no_rule(node: Node) -> str:
    if node.target is _FUNCTION:
        name = function_name(arguments(node)["call"])
        return f"{name}, a torch.autograd.Function, is not pointwise"
    if not has_vocabulary(node):
        return "no sharding rule for it"
    return vocabulary_obstacle(node) or "sharding its classes costs more time than it saves"


def _active(region: Region) -> set[Node]:
    """Differentiable values that parameters or activations go into."""
    active: set[Node] = set()
    for node, kind in zip(region.placeholders, region.input_kinds, strict=True):
        value = node.meta["val"]
        if (
            kind != "size"
            and carries_gradient(value)
            and (kind in ("param", "call") or value.requires_grad)
        ):
            active.add(node)
    for node in region.module.graph.nodes:
        if any(source in active for source in node.all_input_nodes):
            active.add(node)
    return active


def _is_whole(node: Node) -> bool:
    placements = [value.meta.get("placement") for value in (node, *node.all_input_nodes)]
    return all(placement is not None and placement.is_replicated for placement in placements)
