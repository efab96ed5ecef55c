"""Values that take part in sharding, and the roles of their dimensions.

A value is (node, index of its result). It is *active* if it depends on a parameter or on an input
that needs a gradient; all others (positions, masks, rotary tables) are computed by every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from sp_compiler.base.placement import Segmentation
from sp_compiler.ir.fx import carries_gradient, tensor_operands
from sp_compiler.ir.graph_theory import connected
from sp_compiler.ir.program import Call, Program, Region
from sp_compiler.ops.registry import operator_of
from sp_compiler.rules.factors import OpRule
from sp_compiler.rules.table import is_pointwise, rule_for

Value = tuple[Node, int]

ReplicatedNode = tuple[str, str]
"""Names of a region and of an operator in it that is to run replicated."""


def value_of(node: Node) -> Value:
    """Return the value of ``node``, looking through ``getitem`` of several results."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.args[0], node.args[1]
    return node, 0


def results_of(node: Node) -> list[Value]:
    """Return all tensor results of ``node``."""
    value = node.meta["val"]
    return (
        [(node, i) for i in range(len(value))] if isinstance(value, (tuple, list)) else [(node, 0)]
    )


def value_shape(value: Value) -> tuple[int, ...]:
    """Return the shape of ``value``, as in the meta of its node."""
    return tuple(_fake(value).shape)


def value_bytes(value: Value) -> int:
    """Return the bytes of a tensor of the shape and dtype of ``value``."""
    fake = _fake(value)
    return fake.numel() * fake.element_size()


def _fake(value: Value) -> Tensor:
    node, index = value
    fake = node.meta["val"]
    return fake[index] if isinstance(fake, (tuple, list)) else fake


def operators(region: Region) -> Iterator[Node]:
    """Yield nodes that compute: everything but placeholders, outputs and ``getitem``."""
    for node in region.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            yield node


@dataclass
class RegionValues:
    """Facts about one region's values.

    Attributes:
        active: values that take part in sharding.
        tokens: (value, dim) pairs that run over tokens (batch, sequence or both); never a dim of
            size 1: it has no factors, and some values would count it among the features.
        features: (value, dim) pairs that come from a parameter's dim (heads, width, vocabulary).
        segmentations: (value, dim) to the parts in which the dim is cut by another operator.
        rules: the rule of every active operator.
    """

    # Dicts with None as values are ordered sets: the solver's vertices follow their order, which
    # has to be the same on every rank.
    active: dict[Value, None] = field(default_factory=dict)
    tokens: dict[tuple[Value, int], None] = field(default_factory=dict)
    features: dict[tuple[Value, int], None] = field(default_factory=dict)
    segmentations: dict[tuple[Value, int], dict[Segmentation, None]] = field(default_factory=dict)
    rules: dict[Node, OpRule | None] = field(default_factory=dict)

    def add_tokens(self, value: Value, dims: Iterable[int]) -> None:
        """Mark those of ``dims`` that have more than one element, or none."""
        sizes = value_shape(value)
        self.tokens.update({(value, dim): None for dim in dims if sizes[dim] != 1})

    def num_rows(self, value: Value) -> int:
        """Return the number of leading dims that flatten to rows of tokens; 0 if tokens are
        elsewhere."""
        shape = value_shape(value)
        tokens = [dim for dim in range(len(shape)) if (value, dim) in self.tokens]
        if not tokens:  # a weight, or a value that has only features
            return 0
        # Up to the last token dim; the dims in between have size 1 and do not change the rows.
        count = tokens[-1] + 1
        leading = all(dim in tokens or shape[dim] == 1 for dim in range(count))
        return count if leading else 0

    def num_token_dims(self, value: Value) -> int:
        return sum((value, dim) in self.tokens for dim in range(len(value_shape(value))))


def activate(
    program: Program, replicated: Collection[ReplicatedNode] = ()
) -> dict[int, RegionValues]:
    """Return facts by ``id(region)``; activity is propagated along the calls to a fixed point.

    Operators in ``replicated`` have no rule.
    """
    facts = {id(region): RegionValues() for region in program.regions}
    # To a fixed point: a region that is called twice may get an active value at the second call.
    changed = True
    while changed:
        changed = False
        for call in program.calls:
            changed |= _activate_call(program, call, facts)
    for region in program.regions:
        values = facts[id(region)]
        for node in operators(region):
            if any(value in values.active for value in results_of(node)):
                refused = (region.name, node.name) in replicated
                values.rules[node] = None if refused else rule_for(node)
    return facts


def _activate_call(program: Program, call: Call, facts: dict[int, RegionValues]) -> bool:
    """Propagate activity through a call; return whether any value became active."""
    active, has_changed = facts[id(call.region)].active, False
    before = len(active)
    for node, ref in call.inputs:
        if ref.kind == "param" or (ref.kind == "input" and node.meta["requires_grad"]):
            active[node, 0] = None
        elif ref.kind == "call":
            producer = program.calls[ref.index].region
            value, made = value_of(producer.outputs[ref.output]), facts[id(producer)].active
            if value in made:
                active[node, 0] = None
            # Made for another call of the region: this producer's value gets the same placement.
            elif (node, 0) in active:
                made[value] = None
                has_changed = True
    for node in operators(call.region):
        operands = tensor_operands(node)
        # Random numbers that depend only on their position: a rank draws only its part.
        is_source = _is_placed(node) and not any(x.meta["val"].dim() for x in operands)
        if is_source or any(value_of(x) in active for x in operands):
            # Every rank computes integers and booleans made of activations; the exceptions are
            # dropout masks and random numbers, which belong to one rank's part of a value.
            placed = _is_placed(node)
            active.update(
                (value, None)
                for value in results_of(node)
                if placed or carries_gradient(_fake(value))
            )
    return has_changed or len(active) != before


def is_elementwise(node: Node) -> bool:
    """Return whether the node is pointwise, or dropout, whose mask depends on the element's global
    position."""
    return _is_placed(node) or is_pointwise(node)


def _is_placed(node: Node) -> bool:
    ours = operator_of(node.target)
    return ours is not None and ours.placed


def residual_stream(program: Program, facts: dict[int, RegionValues]) -> dict[Value, None]:
    """Return values that cross regions as rows of tokens, and values tied to them elementwise.

    Without sequence parallelism they are replicated; ``label_dims`` must have run.
    """
    stream: dict[Value, None] = {}
    for call in program.calls:
        for node, ref in call.inputs:
            if ref.kind == "call" and facts[id(call.region)].num_rows((node, 0)):
                stream[node, 0] = stream[value_of(program.node_of(ref))] = None
    # A sum ties its operands in both directions. Broadcast operands are excluded: a bias is not
    # part of the stream.
    ties = [
        (operand, (node, 0))
        for region in program.regions
        for node in filter(is_elementwise, facts[id(region)].rules)
        for operand in map(value_of, tensor_operands(node))
        if value_shape(operand) == value_shape((node, 0))
    ]
    for values in connected(ties):
        if any(value in stream for value in values):
            stream.update(dict.fromkeys(values))
    return stream
