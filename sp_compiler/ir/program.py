"""The compiler's own representation of a model: distinct regions and the calls that use them.

A region is a flat graph of ATen operators (composite ones such as ``linear`` are not decomposed)
whose placeholders are its parameters, buffers and values. Each distinct region is solved, checked,
traced and generated once, and called once per layer that it represents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from sp_compiler.base.decisions import Decision
from sp_compiler.base.placement import Placement, R
from sp_compiler.base.stored_attributes import Stored
from sp_compiler.ir.hints import Parameters, Wish
from sp_compiler.ir.symbolic import Sizes

RefKind = Literal["param", "buffer", "constant", "input", "call", "seed", "size"]


@dataclass(frozen=True)
class Ref:
    """Source of a value.

    Attributes:
        kind: ``"param"``, ``"buffer"``, ``"constant"`` (named by ``name``), ``"input"`` (leaf
            ``index`` of the flattened user inputs), ``"call"`` (output ``output`` of call
            ``index``), ``"seed"`` (the dropout seed of this forward, made distinct by ``index``),
            ``"size"`` (the size of dim ``output`` of leaf ``index`` of the user inputs, an int).
    """

    kind: RefKind
    name: str = ""
    index: int = 0
    output: int = 0


@dataclass
class Region:
    """One distinct piece of the model.

    Attributes:
        name: a class name for the generated code, such as ``"GPT2Block"``; unique in the program.
        module: the graph. Every node has ``meta["val"]`` (a FakeTensor; its ``requires_grad`` is
            not used), ``meta["requires_grad"]`` (whether a gradient flows to it in training) and
            the user's ``nn_module_stack`` and ``stack_trace``. After sharding, shapes are those of
            one rank, and ``meta["placement"]`` is the node's :class:`Placement`.
        input_kinds: :data:`RefKind` of each placeholder, in order.
        input_names: for parameters and buffers the name in the block (``"attn.c_attn.weight"``),
            for values a readable name, in order.
        input_placements: set by sharding; placements of the local tensors (never "T").
        output_placements: set by sharding.
        input_shapes: set by sharding; shapes of the full values, with open sizes; ``None`` for
            values that are not tensors. Local tensors in rows form do not show theirs.
        output_shapes: set by sharding.
    """

    name: str
    module: GraphModule
    input_kinds: tuple[RefKind, ...]
    input_names: tuple[str, ...]
    input_placements: tuple[Placement, ...] = ()
    output_placements: tuple[Placement, ...] = ()
    input_shapes: tuple[tuple[int, ...] | None, ...] = ()
    output_shapes: tuple[tuple[int, ...] | None, ...] = ()

    @property
    def placeholders(self) -> list[torch.fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[torch.fx.Node]:
        return list(self.module.graph.output_node().args[0])


@dataclass(frozen=True)
class Call:
    """One use of a region.

    Attributes:
        region: the region that is called.
        path: the layer in the model (``"transformer.h.3"``) or "".
        args: source of each argument.
        results: for each output the node of the flat graph with its value, "" if unknown.
    """

    region: Region
    path: str
    args: tuple[Ref, ...]
    results: tuple[str, ...] = ()

    @property
    def inputs(self) -> list[tuple[torch.fx.Node, Ref]]:
        """The region's placeholders, each with the source of its argument."""
        return list(zip(self.region.placeholders, self.args, strict=True))


@dataclass
class Program:
    """The model: calls in execution order.

    Attributes:
        calls: a call uses only values from earlier ones.
        outputs: the flattened outputs of the model, then the tensors of ``stored``; a leaf that is
            not a tensor is the object itself.
        out_spec: pytree structure of the model's own output.
        mutated_buffers: buffer name to the new value that is written back after the forward.
        aliases: parameter name to the name under which the same tensor is used (tied weights).
        constants: tensors of the model that are neither parameters nor buffers, by name.
        notes: remarks for the user (fallbacks with reasons).
        parameters: parameters of the model, used or not.
        wishes: union of the user's hints, by parameter.
        sizes: the open dims, ``None`` if all sizes are fixed to the example's.
        functions: calls of the model's autograd functions, see
            :class:`~sp_compiler.ir.captured.Captured`.
        decisions: numbers that the forward reads from inputs and buffers; the program is valid only
            for these numbers.
        stored: values that the forward stores in attributes of modules.
        experts: names of the parameters whose first dim is divided over the axis "ep".
        copied: positions of outputs that are returned as copies.
    """

    calls: list[Call]
    outputs: list[Any]
    out_spec: TreeSpec
    mutated_buffers: dict[str, Ref] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    wishes: dict[str, Wish] = field(default_factory=dict)
    sizes: Sizes | None = None
    functions: Sequence[object] = ()
    decisions: Sequence[Decision] = ()
    stored: Sequence[Stored] = ()
    experts: Sequence[str] = ()
    copied: frozenset[int] = frozenset()

    @property
    def regions(self) -> list[Region]:
        """Distinct regions in order of first use."""
        # By identity: equal regions of two programs are different regions.
        return list({id(call.region): call.region for call in self.calls}.values())

    @property
    def call_outputs(self) -> dict[int, Ref]:
        """The outputs that calls compute, by position in ``outputs``."""
        return {
            position: ref
            for position, ref in enumerate(self.outputs)
            if isinstance(ref, Ref) and ref.kind == "call"
        }

    def node_of(self, ref: Ref) -> torch.fx.Node:
        """Return the node in the region's graph that computes ``ref``, an output of a call."""
        return self.calls[ref.index].region.outputs[ref.output]

    @property
    def loss(self) -> Ref | None:
        """The output that is the model's loss, see :func:`loss_position`; ``None`` if there is
        none."""
        scalars: dict[int, Ref] = {}
        for position, ref in self.call_outputs.items():
            node = self.node_of(ref)
            is_returned = position < self.out_spec.num_leaves  # rather than only stored
            if is_returned and node.meta["val"].dim() == 0 and node.meta.get("requires_grad"):
                scalars[position] = ref
        found = loss_position(self.out_spec, scalars)
        return None if found is None else scalars[found]

    def paths(self, region: Region) -> list[str]:
        """Return the layers that ``region`` represents, one per call; "" outside of layers."""
        return [call.path for call in self.calls if call.region is region]

    def own_parameters(self, world_size: int) -> list[frozenset[int]]:
        """Return for each call the positions of parameters whose final gradient it computes.

        The gradients of other parameters are temporary: if several calls use a parameter, until
        they are added up; if it is replicated on ``world_size`` ranks, until they are reduced; if
        it is padded, until they are copied without the padding.
        """
        # A set, since a call with a parameter twice among its arguments computes one gradient of
        # it. A call under no_grad computes none.
        uses = Counter(
            ref.name
            for call in filter(_has_backward, self.calls)
            for ref in set(call.args)
            if ref.kind == "param"
        )
        return [
            frozenset(
                index
                for index, ref in enumerate(call.args)
                if ref.kind == "param"
                and uses[ref.name] == 1
                and (world_size == 1 or _is_final(call.region.input_placements[index], world_size))
            )
            for call in self.calls
        ]

    def gradients_in_place(self, world_size: int) -> list[frozenset[int]]:
        """Return for each call the positions of parameters whose gradient it puts into ``grad``.

        On several ranks these are more than :meth:`own_parameters`: ``grad`` of a DTensor gets the
        first part of a sum, to which the runtime adds the others. Autograd keeps its sums apart.
        """
        if world_size == 1:
            return self.own_parameters(world_size)
        begun: set[str] = set()
        found: list[frozenset[int]] = []
        for call in reversed(self.calls):
            refs = enumerate(call.args) if _has_backward(call) else ()
            names = {k: ref.name for k, ref in refs if ref.kind == "param"}
            final = {k for k in names if _is_final(call.region.input_placements[k], world_size)}
            found.append(frozenset(k for k in final if names[k] not in begun))
            begun.update(names.values())
        return found[::-1]

    def copied_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that forward writes and calls read, by name: the runtime copies them
        first."""
        return {
            ref.name: node.meta["val"]
            for call in self.calls
            for ref, node in zip(call.args, call.region.placeholders, strict=True)
            if ref.kind == "buffer" and ref.name in self.mutated_buffers
        }

    def last_uses(self) -> list[list[int]]:
        """Return for each call the calls whose outputs it is the last to use."""
        # By call and not by output, as the runtime frees them. If one output of a call is returned,
        # all its outputs stay to the end.
        returned = (*self.outputs, *self.mutated_buffers.values())
        returned_calls = {r.index for r in returned if isinstance(r, Ref) and r.kind == "call"}
        last_user: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            last_user[index] = index  # unused outputs die at once
            last_user.update((ref.index, index) for ref in call.args if ref.kind == "call")
        dead: list[list[int]] = [[] for _ in self.calls]
        for producer, user in last_user.items():
            if producer not in returned_calls:
                dead[user].append(producer)
        return dead


def loss_position(out_spec: TreeSpec, scalars: Collection[int]) -> int | None:
    """Return the position of the loss in the flattened outputs of a model; ``None`` if there is
    none.

    It is the output that the model calls ``loss`` (a key or a field), else the first scalar.

    Args:
        out_spec: structure of the model's own output.
        scalars: positions of the outputs that are scalars with a gradient.
    """
    # A single one needs no name. A user's class may not accept positions in place of its values.
    if len(scalars) < 2:
        return min(scalars, default=None)
    # Parts of a loss may come before their sum, and have gradients too.
    outputs = pytree.tree_unflatten(range(out_spec.num_leaves), out_spec)
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, int) and named in scalars:
        return named
    return min(scalars)


def _has_backward(call: Call) -> bool:
    """Return whether gradients flow through ``call``, as they do not under ``no_grad``."""
    return any(node.meta["requires_grad"] for node in call.region.outputs)


def _is_final(placement: Placement, world_size: int) -> bool:
    return placement != R and not placement.is_copied_for_padding(world_size)
