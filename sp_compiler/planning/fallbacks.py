"""Parameters and operators that stay replicated, and why; this costs speed, never correctness.

They are derived from the sharded program, not recorded during sharding. The placements of its nodes
show the choices, including those for operators that the check rejected later and for regions that a
budget duplicates, and looking up a rule again is cheap (1 to 2 ms for a GPT or a Llama).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.base.units import time_text
from sp_compiler.cost.node_cost import node_flops, product_flops, tensor_bytes
from sp_compiler.ir.compiled_program import CompiledProgram, PassedOver
from sp_compiler.ir.fx import (
    arguments,
    carries_gradient,
    descendants,
    operands,
    reach,
    tensor_operands,
)
from sp_compiler.ir.op_traits import is_view
from sp_compiler.ir.program import Region
from sp_compiler.planning.placement_explanation import cost_text
from sp_compiler.rules.table import has_rule, missing_rule, rule_for
from sp_compiler.rules.vocabulary import has_vocabulary, vocabulary_obstacle
from sp_compiler.trace.autograd_functions import function_name

_aten = torch.ops.aten
_FUNCTION = torch.ops.sp_compiler_function.apply.default
_ATTENTION = _aten.scaled_dot_product_attention.default
_SOFTMAX = frozenset({_aten.softmax.int, _aten._softmax.default, _aten._safe_softmax.default})
_CONVOLUTIONS = frozenset({"aten::convolution", *(f"aten::conv{n}d" for n in (1, 2, 3))})

# A small matrix (a LoRA factor, a classifier) or a loss over few classes is replicated where a
# collective takes longer than the copy. This is reported only for larger values.
_CHOICE_BYTES = 1 << 20


@dataclass(frozen=True)
class Fallback:
    """A parameter that is stored, or an operator that runs, replicated.

    Attributes:
        subject: the parameter, or the operator and its module.
        module: path of the module, or the line in the model's forward, or the parameter.
        reason: why it is not sharded.
        advice: what to do about it, "" if unknown.
        flops: matrix FLOPs of its forward in one step.
        num_bytes: bytes of the replicated parameters; 0 if the choice is unimportant.
        is_attention: whether it is a matmul inside an attention core.
        has_rule: whether it has a rule; without one it may keep its neighbours replicated.
    """

    subject: str
    module: str
    reason: str
    advice: str = ""
    flops: float = 0.0
    num_bytes: int = 0
    is_attention: bool = False
    has_rule: bool = True

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"


def fallbacks(compiled: CompiledProgram) -> Iterator[str]:
    """Return one line per fallback, parameters first; none for one rank."""
    yield from dict.fromkeys(map(str, all_fallbacks(compiled)))


def all_fallbacks(compiled: CompiledProgram) -> Iterator[Fallback]:
    """Return the fallbacks as data, each operator once per region."""
    if compiled.world_size == 1:
        return
    yield from _parameters(compiled)
    for region in compiled.program.regions:
        yield from _operators(compiled, region)


# Parameters.


def parameter_nodes(compiled: CompiledProgram) -> Iterator[tuple[str, Node]]:
    """Yield the stored name of each parameter, tied ones once, and the first placeholder that
    receives this rank's part."""
    seen: set[str] = set()
    for call in compiled.program.calls:
        for node, ref in call.inputs:
            # By stored name, so that a tied weight is not counted twice.
            if ref.kind == "param" and compiled.param_name(ref.name) not in seen:
                seen.add(compiled.param_name(ref.name))
                yield compiled.param_name(ref.name), node


def _parameters(compiled: CompiledProgram) -> Iterator[Fallback]:
    """Return replicated parameters with two or more dims; equal ones are merged."""
    alike: dict[str, list[Fallback]] = {}
    for name, node in parameter_nodes(compiled):
        value = node.meta["val"]
        # Norm weights and biases are replicated by design, where tokens are sharded instead.
        if len(value.shape) < 2 or compiled.param_placements[name].is_sharded:
            continue
        asked = _asked(compiled, name)
        reason, advice, is_choice = _why(name, node, compiled.world_size)
        size = tensor_bytes(value)
        # A choice of the cost model or of the user is listed, but causes no warning.
        counts = not asked and (not is_choice or size >= _CHOICE_BYTES)
        shape = "x".join(map(str, value.shape))
        text = f"({shape}) {asked or reason}"
        fallback = Fallback("", name, text, advice, num_bytes=size if counts else 0)
        # Layers repeat: 32 of them with one odd weight each are one line, not 32.
        alike.setdefault(text, []).append(fallback)
    for first, *others in alike.values():
        more = f" and {len(others)} more like it" if others else ""
        subject = f"parameter {first.module}{more} is replicated"
        num_bytes = first.num_bytes * (1 + len(others))
        yield replace(first, subject=subject, module=first.module + more, num_bytes=num_bytes)


def _asked(compiled: CompiledProgram, name: str) -> str:
    """Return the user's hint that requires a replicated parameter, "" if there is none."""
    wish = compiled.program.wishes.get(name)
    return str(wish) if wish and not any(wish.allowed[1:]) else ""


def _why(name: str, node: Node, world_size: int) -> tuple[str, str, bool]:
    """Return the reason, advice, and whether it could be sharded but the cost model chose
    otherwise."""
    shape = node.meta["val"].shape
    # From the least to the most avoidable: a size affects every rule, a missing rule every cost.
    if all(size % world_size for size in shape):
        reason = f"no dim is divisible by {world_size}, and padding is not worthwhile"
        return reason, _other_tp(shape), False
    for user in node.users:
        if user.op == "call_function" and _has_no_rule(user):
            return missing_rule(user, str(user.target)), _advice_of_rule(user), False
    if any(is_product(user) and is_replicated(user) for user in node.users):
        # The product is a fallback of its own, with its own reason.
        return "the operator that reads it runs replicated", "", True
    size = math.prod(shape)
    reason = f"sharding its {size} elements costs more time than it saves memory"
    return reason, _advice_explain(name), True


_ADVICE_RULE = "Register a rule for the operator with sp_compiler.rule"
_ADVICE_OPERATOR = (
    "Write it as a custom operator (torch.library.custom_op) and register a rule for it with "
    "sp_compiler.rule"
)


def _advice_explain(name: str) -> str:
    """Return advice to call :meth:`Plan.explain` with ``name``."""
    asked = f"explain({name!r})" if name else "explain(name of a parameter)"
    return f"{asked} of the plan (module.plan or sp_compiler.plan(...)) shows what others cost"


def _other_tp(sizes: Iterable[int]) -> str:
    distinct = list(map(str, dict.fromkeys(sizes)))
    return f"Choose a tp that divides {'one of ' * (len(distinct) > 1)}{', '.join(distinct)}"


# Operators.


def is_product(node: Node) -> bool:
    """Return whether ``node`` is a matrix product, a convolution, or fused attention."""
    return product_flops(node) > 0


def forward_flops(node: Node) -> float:
    """Return the matrix FLOPs of one call on one rank."""
    return product_flops(node) or node_flops(node)[0] if node.op == "call_function" else 0.0


def _operators(compiled: CompiledProgram, region: Region) -> Iterator[Fallback]:
    """Return operators on activations without a rule, and matrix products of replicated factors."""
    alike: dict[str, list[Fallback]] = {}
    differentiable = _differentiable(region)
    activations = activations_of(region)
    calls = [call for call in compiled.program.calls if call.region is region]
    asked = {
        node
        for node, ref in zip(region.placeholders, calls[0].args, strict=True)
        if ref.kind == "param" and _asked(compiled, compiled.param_name(ref.name))
    }
    for node in region.module.graph.nodes:
        # Values without gradients (positions, masks, indices) are small and replicated by design.
        if node.op != "call_function" or node not in differentiable or is_view(node):
            continue
        is_choice = _is_choice(node)
        if is_choice and tensor_bytes(tensor_operands(node)[0].meta["val"]) < _CHOICE_BYTES:
            continue
        has_rule = is_choice or not _has_no_rule(node)
        if has_rule and not is_choice and not (is_product(node) and is_replicated(node)):
            continue
        is_attention = is_attention_core(node, activations)
        if is_choice:
            reason, advice = "sharding its classes costs more time than it saves", ""
        elif not has_rule:
            reason, advice = _why_no_rule(node)
        else:
            reason, advice = _why_product(node, region, compiled, is_attention=is_attention)
        path, line = module_path(node), source_line(node)
        counts = is_replicated(node) and not any(
            source in asked for source in tensor_operands(node)
        )
        # A path says where to look; in the model's own forward, which is long, the line does.
        at = f" ({line})" if line and not path else ""
        fallback = Fallback(
            f"{node.target} in {path or '(model)'} of {region.name} runs replicated{at}",
            path or line or "(model)",
            reason,
            advice,
            # Times the number of layers that share the block, each of which costs time.
            flops=forward_flops(node) * len(calls) if counts else 0.0,
            is_attention=counts and is_attention,
            has_rule=has_rule,
        )
        alike.setdefault(str(fallback), []).append(fallback)
    for items in alike.values():
        times = "" if len(items) == 1 else f" (x {len(items)})"
        yield replace(
            items[0],
            reason=items[0].reason + times,
            flops=sum(item.flops for item in items),
            is_attention=any(item.is_attention for item in items),
        )


def _why_product(
    node: Node, region: Region, compiled: CompiledProgram, *, is_attention: bool
) -> tuple[str, str]:
    """Reason and advice for a product that has a rule."""
    # Before looking at sizes: those of an operator that the check rejected are divisible.
    key = region.name, node.meta.get("source", node.name)
    if key in compiled.replicated:
        advice = "Please report it with the note in plan.notes"
        return "its sharding could not be proven correct", advice
    factors, world_size = tensor_operands(node)[:2], compiled.world_size
    sizes = list(factors[0].meta["val"].shape)
    if is_attention and key in compiled.paddable:
        return _why_not_padded(compiled.paddable[key], world_size, may_pad=True)
    if node.target is _ATTENTION and len(sizes) > 3 and sizes[-3] % world_size:
        return _why_not_padded(sizes[-3], world_size, may_pad=False)
    shapes = " x ".join(str(tuple(factor.meta["val"].shape)) for factor in factors)
    explain = _advice_explain(_name_near(node, region, compiled))
    if key in compiled.passed_over:
        return _why_passed_over(compiled.passed_over[key], shapes, world_size), explain
    reason = f"no way to shard {shapes} over {world_size} ranks"
    if node.target.name().partition(".")[0] in _CONVOLUTIONS:
        return _why_convolution(node, reason, world_size, explain)
    if any(size % world_size == 0 for size in sizes):
        # Sharding calls such a dim a feature; an operator without a rule makes none.
        why = (
            "batch and tokens are not sharded here, and no other dim is both divisible and derived "
            "from a parameter through operators with a rule"
        )
        return f"{reason}: {why}", explain
    return f"{reason}: none of its sizes is divisible", _other_tp(sizes)


def _why_convolution(node: Node, reason: str, world_size: int, explain: str) -> tuple[str, str]:
    """Reason and advice for a convolution, whose rule shards the groups or the channels."""
    groups, weight = arguments(node).get("groups", 1), tensor_operands(node)[1].meta["val"]
    channels = node.meta["val"].shape[1 - weight.dim()]
    num, what = (groups, "groups") if groups > 1 else (channels, "channels")
    if num % world_size == 0:
        return f"{reason}: its operands are replicated", explain
    # A single channel, of a mask or a waveform, is not meant to be split.
    return f"{reason}: its {num} {what} are not divisible", _other_tp([num]) if num > 1 else ""


def _why_passed_over(more: PassedOver | None, shapes: str, world_size: int) -> str:
    """Return the reason for a product that could be sharded."""
    if more is None:
        return f"sharding {shapes} over {world_size} ranks is not worthwhile"
    parts = (more.communication_us, "communication"), (more.compute_us, "compute")
    times = (f"{time_text(abs(us))} {'more' if us > 0 else 'less'} {what}" for us, what in parts)
    cost = cost_text(more.communication_us + more.compute_us, more.memory_us)
    return (
        f"sharding {shapes} over {world_size} ranks is not worthwhile: it would cost {cost} a step "
        f"({', '.join(times)})"
    )


def _name_near(node: Node, region: Region, compiled: CompiledProgram) -> str:
    """Return the innermost module around ``node`` that has parameters, else a parameter from which
    it is computed; "" if there is none."""
    path, names = module_path(node), compiled.program.parameters
    while path and not any(name.startswith(f"{path}.") for name in names):
        path = path.rpartition(".")[0]
    if path:
        return path
    call = next(call for call in compiled.program.calls if call.region is region)
    refs = dict(call.inputs)
    sources = (refs.get(source) for source in reach(operands(node), operands))
    return next((ref.name for ref in sources if ref is not None and ref.kind == "param"), "")


def _why_not_padded(heads: int, world_size: int, *, may_pad: bool) -> tuple[str, str]:
    """Reason and advice for an attention core whose number of heads is not divisible.

    ``may_pad``: whether it could run on padded heads, but something else was cheaper.
    """
    padded = world_size * -(-heads // world_size)
    why = (
        f"padding them to {padded} is estimated to cost more time and memory than it saves"
        if may_pad
        else "padding them could be wrong here, for example with a mask that differs between heads"
    )
    reason = f"its {heads} heads are not divisible by {world_size} ranks, and {why}"
    return reason, f"{_other_tp([heads])}, or a number of heads that is divisible by {world_size}"


def _has_no_rule(node: Node) -> bool:
    if getattr(node.target, "namespace", "sp_compiler") == "sp_compiler":
        return False
    return rule_for(node) is None


def _advice_of_rule(node: Node) -> str:
    # A user cannot register a rule for an operator that has a built-in one.
    return _ADVICE_OPERATOR if has_rule(node) else _ADVICE_RULE


def _is_choice(node: Node) -> bool:
    """Return whether a loss could run on sharded classes, but the cost model chose otherwise."""
    return has_vocabulary(node) and _has_no_rule(node) and not vocabulary_obstacle(node)


def _why_no_rule(node: Node) -> tuple[str, str]:
    """Reason and advice for an operator without a rule."""
    if node.target is _FUNCTION:
        name = function_name(arguments(node)["call"])
        return f"{name}, a torch.autograd.Function, is not pointwise", _ADVICE_OPERATOR
    if has_vocabulary(node):
        return vocabulary_obstacle(node), ""
    return missing_rule(node, str(node.target)), _advice_of_rule(node)


def _differentiable(region: Region) -> set[Node]:
    """Return differentiable values that depend on parameters or activations."""
    pairs = list(zip(region.placeholders, region.input_kinds, strict=True))
    sources = {
        node
        for node, kind in pairs
        # Integers and booleans cannot carry a gradient, whatever they are computed from.
        if kind != "size" and carries_gradient(node.meta["val"])
        if kind in ("param", "call") or node.meta["val"].requires_grad
    }
    return descendants(sources)


def activations_of(region: Region) -> set[Node]:
    """Return the values that depend on the batch."""
    kinds = zip(region.placeholders, region.input_kinds, strict=True)
    return descendants(node for node, kind in kinds if kind in ("call", "input"))


def is_attention_core(node: Node, activations: set[Node]) -> bool:
    """Return whether ``node`` is fused attention, or a product with the softmax of another
    product.

    Args:
        activations: see :func:`activations_of`.
    """
    if node.target is _ATTENTION:
        return True

    # By structure, because names differ between models: a product with a factor that is a softmax
    # of another product, both of activations. A router's softmax also weights outputs of experts,
    # but its operand is not a product of two activations.
    products = {other for other in node.graph.nodes if is_product(other)}

    def multiplies_activations(product: Node) -> bool:
        return product in products and activations.issuperset(tensor_operands(product)[:2])

    def sources(start: Node) -> Iterable[Node]:
        """Return the values that ``start`` is computed from, up to the nearest products."""
        return reach(operands(start), operands, stop=products)

    softmaxes = [source for source in sources(node) if source.target in _SOFTMAX]
    scores = (source for softmax in softmaxes for source in sources(softmax))
    return multiplies_activations(node) and any(map(multiplies_activations, scores))


def is_replicated(node: Node) -> bool:
    """Return whether every rank runs ``node`` on the same full operands."""
    placements = [value.meta.get("placement") for value in (node, *node.all_input_nodes)]
    return all(placement is not None and placement.is_replicated for placement in placements)
