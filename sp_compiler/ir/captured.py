"""A model as one flat graph, before it is cut into regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from sp_compiler.base.decisions import Decision
from sp_compiler.base.stored_attributes import Stored
from sp_compiler.ir.fx import module_of
from sp_compiler.ir.hints import Parameters
from sp_compiler.ir.program import Ref
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.symbolic import Sizes


@dataclass
class Captured:
    """A model as one flat graph.

    Attributes:
        module: functional graph; placeholders are parameters, buffers, constants, user inputs and,
            once normalized, at most one seed. It returns one tuple: the flattened outputs (a leaf
            that is not a tensor is returned as it is), the tensors of ``stored``, then the new
            value of each mutated buffer. Every node has ``meta["val"]`` and
            ``meta["requires_grad"]``.
        refs: source of each placeholder's value, in order.
        in_spec: pytree structure of the user inputs, as flattened by
            :func:`sp_compiler.trace.export.flatten_inputs`.
        out_spec: structure of the model's own output.
        mutated: names of the buffers that the forward writes.
        aliases: parameter or buffer name to the name under which the same tensor is used.
        constants: tensors of the model that are neither parameters nor buffers.
        notes: remarks for the user, shown in the plan.
        parameters: parameters of the model, used or not.
        sizes: the open dims, ``None`` if all sizes are fixed to the example's; each has a
            placeholder whose value is the size.
        functions: calls of the model's autograd functions, which the graph refers to by number.
            They live as long as this object, since the registry has only weak references to them.
        decisions: numbers that the forward reads from inputs and buffers; the graph is valid only
            for these numbers.
        stored: values that the forward stores in attributes of modules.
        experts: names of the parameters whose first dim is divided over the axis "ep".
        copied: positions of outputs that are copies of an input, a parameter, a constant or another
            output; the graph has no copies once it is normalized.
    """

    module: GraphModule
    refs: list[Ref]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    mutated: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    sizes: Sizes | None = None
    functions: Sequence[object] = ()
    decisions: Sequence[Decision] = ()
    stored: Sequence[Stored] = ()
    experts: Sequence[str] = ()
    copied: frozenset[int] = frozenset()

    @property
    def placeholders(self) -> list[Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> list[Any]:
        """The node or constant of each leaf that the model returns, then of each that it stores."""
        # After them, the same tuple has the new values of buffers.
        returned = list(self.module.graph.output_node().args[0])
        return returned[: len(returned) - len(self.mutated)]

    @property
    def mutated_buffers(self) -> dict[str, Node]:
        """Buffer name to the node that holds its value after the forward."""
        returned = list(self.module.graph.output_node().args[0])
        return dict(zip(self.mutated, returned[len(returned) - len(self.mutated) :], strict=True))

    def copy(self) -> Captured:
        """Copy the graph; its tensors remain the model's."""
        module = module_of(copy_graph(self.module.graph), self.module)
        return replace(self, module=module, refs=list(self.refs))

    def drop_unused_placeholders(self) -> None:
        """Erase placeholders that nothing uses, together with their refs."""
        # Sizes stay: uses of a symbol are in shapes, not among the users of its placeholder.
        refs = []
        for node, ref in zip(self.placeholders, self.refs, strict=True):
            if node.users or ref.kind == "size":
                refs.append(ref)
            else:
                self.module.graph.erase_node(node)
        self.refs = refs
