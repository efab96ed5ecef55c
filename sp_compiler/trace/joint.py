"""The joint forward and backward graph of a region.

Only this file, effects.py and tracer_patches.py use PyTorch's private ahead-of-time autograd;
``tests/trace/test_joint.py`` tests the behavior that they rely on.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from sp_compiler.base.errors import PassError
from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.python_text import identifier
from sp_compiler.ir.compiled_program import Reached
from sp_compiler.ir.fx import ancestors, carries_gradient
from sp_compiler.ir.op_traits import COPIES, RESULT_NAMES
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import copy_graph, erase_dead
from sp_compiler.ir.snapshot import IN_CHUNKS
from sp_compiler.ir.symbolic import inline_sizes, same_shape
from sp_compiler.trace import effects
from sp_compiler.trace.autograd_functions import attributes_kept, numbers_of_calls, reached
from sp_compiler.trace.tracer_patches import (
    fix_states_of_lstms,
    generators_left_alone,
    powers_of_sizes,
)

aten = torch.ops.aten

# torch internals: descriptors identify the inputs and outputs of a joint graph; without them the
# order of gradients and tangents would have to be guessed from their number.
_SOURCE = "sp_source"
_ALIASES = (aten.alias.default, aten.detach.default)


@dataclass
class JointGraph:
    """Forward and backward of a region in one graph.

    Attributes:
        graph: placeholders are the region's inputs, named after them, then the tangents; the
            output is a flat tuple of the region's outputs and one gradient (or None) per input.
            Every node has ``meta["val"]``. Nodes traced from a region node, including those in
            backward, have ``meta["source"]`` (its name), its ``nn_module_stack`` and
            ``stack_trace``. The forward node that computes its value has its ``meta["placement"]``.
        num_inputs: number of region inputs.
        num_outputs: number of region outputs.
        tangent_outputs: index of the region output that each tangent belongs to.
        input_kinds: :data:`~sp_compiler.ir.program.RefKind` of each input.
        region: name of the region, for errors.
        chunks: the part that runs in chunks of rows, such as "loss in 4 chunks"; "" for none.
    """

    graph: fx.Graph
    num_inputs: int
    num_outputs: int
    tangent_outputs: tuple[int, ...]
    input_kinds: tuple[str, ...]
    region: str
    chunks: str = ""

    @property
    def name(self) -> str:
        """Name of this graph, unique among all regions: it includes the chunks, if any."""
        return IN_CHUNKS.join(filter(None, (self.region, self.chunks)))

    @property
    def placeholders(self) -> list[fx.Node]:
        return self.graph.find_nodes(op="placeholder")

    @property
    def inputs(self) -> list[fx.Node]:
        return self.placeholders[: self.num_inputs]

    @property
    def tangents(self) -> list[fx.Node]:
        return self.placeholders[self.num_inputs :]

    @property
    def outputs_of_tangents(self) -> dict[fx.Node, int]:
        """The index of the output that each tangent belongs to."""
        return dict(zip(self.tangents, self.tangent_outputs, strict=True))

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self._results[: self.num_outputs])

    @property
    def grads(self) -> list[fx.Node | None]:
        """Gradients, one per input; None if no gradient flows to it."""
        return list(self._results[self.num_outputs :])

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Return whether a gradient flows through each output."""
        return tuple(index in self.tangent_outputs for index in range(self.num_outputs))

    def reached_from(self) -> Reached:
        """Return from which outputs gradients flow to the inputs."""
        return reached.reached_from(self.graph, self.outputs_of_tangents, self.grads)

    def copy(self) -> JointGraph:
        """Return a copy with new nodes, whose ``meta`` can be changed."""
        return replace(self, graph=copy_graph(self.graph))

    @property
    def _results(self) -> Sequence[Any]:
        return self.graph.output_node().args[0]

    def backward_nodes(self) -> set[fx.Node]:
        """Return the nodes that depend on a tangent, or that no forward output needs."""
        forward = ancestors(self.outputs)
        # A forward operator may have results that only backward reads, such as rstd of a norm.
        for node in self.graph.nodes:
            # Such a result that is joined from chunks is a node of its own.
            is_part = node.target is operator.getitem or node.meta.get("chunk") == "joined"
            if is_part and forward.issuperset(node.all_input_nodes):
                forward.add(node)
        forward.update(self.inputs)
        return {node for node in self.graph.nodes if node not in forward and node.op != "output"}


def trace_joint(region: Region) -> JointGraph:
    """Differentiate a sharded region.

    Gradients are computed for the inputs whose placeholder has ``meta["requires_grad"]``; without
    any, the graph is only the forward. Inputs are assumed to be contiguous, tangents must be.
    Aliases and copies without an effect are dropped.

    Raises:
        PassError: a placeholder without ``meta["val"]``.
    """
    fix_states_of_lstms()
    # Without functionalization a trace takes a fifth less time. Regions are functional already, and
    # so are the derivatives of most.
    functionalize = effects.has_effects(region.module.graph)
    with attributes_kept(numbers_of_calls(region.module.graph)):
        traced = _trace(region, functionalize)
        if not functionalize and effects.has_writes(traced.graph):
            traced = _trace(region, functionalize=True)
    # PyTorch's order and names of nodes are not kept: both change between versions.
    joint = _rebuild(traced.graph, region)
    # Before provenance is copied: copies of outputs are recognized by having no source.
    _drop_no_ops(joint.graph)
    reached.drop_determined(joint.graph, joint.outputs_of_tangents)
    _copy_provenance(joint, region)
    return joint


def _trace(region: Region, functionalize: bool) -> fx.GraphModule:
    values = [node.meta.get("val") for node in region.placeholders]
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    # Where sizes are open, the mode uses their ShapeEnv, which records comparisons.
    mode = FakeTensorMode(shape_env=sizes[0].node.shape_env if sizes else None)
    args = [_fake_input(node, mode) for node in region.placeholders]
    with contextlib.ExitStack() as stack:
        if mode.shape_env is not None:
            # Composite operators in C++ would read open sizes, and so specialize them.
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(powers_of_sizes())
        stack.enter_context(fx.traceback.preserve_node_meta())
        stack.enter_context(_use_lazy_graph_module(True))  # the code of the graph is never run
        stack.enter_context(generators_left_alone())
        stack.enter_context(mode)
        module, off = _Interpreted(region.module), not functionalize
        # The disabled mode would note the torch function of each node in its meta, which is unused.
        options: Any = {"disable_functionalization": off, "_disable_torch_fn_metadata_mode": True}
        traced = aot_export_joint_with_descriptors(stack, module, tuple(args), **options)
    return traced.graph_module


class _Interpreted(nn.Module):
    """Runs a graph node by node, so that every traced node has the name of its source.

    Each output is copied, so that an output that is an input or a view has its own gradient.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._run = reached.ReachedGradients(module, graph=_with_sources(module.graph)).run

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        outputs = self._run(*args)
        # Contiguous, since tangents must be, and the trace gives them the strides of the outputs.
        return tuple(aten.clone.default(x, memory_format=torch.contiguous_format) for x in outputs)


def _with_sources(original: fx.Graph) -> fx.Graph:
    graph = copy_graph(original)
    for node in graph.nodes:
        if node.op == "call_function":
            # torch internals: the only entry of meta that the joint trace copies to the nodes that
            # a node becomes, including those of its gradient.
            node.meta["custom"] = {_SOURCE: node.name}
    return graph


def _fake_input(node: fx.Node, mode: FakeTensorMode) -> Tensor:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        # The tracer learns of a symbol only from a tensor; _rebuild() turns the placeholder into a
        # number again.
        with mode:
            return torch.empty((value,), device="cpu")
    if not isinstance(value, FakeTensor):
        raise PassError(Pass.JOINT, 'a region input needs meta["val"], a FakeTensor', node)
    # A trace on the meta device loses most of the backward.
    device = "cpu" if value.device.type == "meta" else value.device
    with mode:
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
    return fake.requires_grad_(bool(node.meta.get("requires_grad")) and carries_gradient(fake))


def _rebuild(traced: fx.Graph, region: Region) -> JointGraph:
    """Copy a traced graph into the order and names documented here, without PyTorch's
    conventions."""
    effects.let_factorizations_raise(traced, region)
    effects.drop_effects(traced)
    effects.drop_defaults(traced)
    placeholders = traced.find_nodes(op="placeholder")
    inputs: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in placeholders:
        desc = node.meta["desc"]
        if _is_tangent(node):
            assert isinstance(desc.output, PlainAOTOutput), desc
            tangents[desc.output.idx] = node
        else:
            assert isinstance(desc, PlainAOTInput), desc
            inputs[desc.idx] = node
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, name in enumerate(region.input_names):
        _copy_placeholder(graph, inputs[index], identifier(name), copies)
    # Only outputs that require a gradient have a tangent, so the indices have gaps.
    for index in sorted(tangents):
        _copy_placeholder(graph, tangents[index], f"grad_out{index}", copies)
    _copy_calls(traced, graph, copies)
    # By descriptor, not by position: PyTorch has no entry for an input without a gradient.
    outputs, grads = _results(traced)
    num_inputs, num_outputs = len(inputs), len(outputs)
    results = [outputs[index] for index in range(num_outputs)]
    results += [grads.get(index) for index in range(num_inputs)]
    graph.output(tuple(None if node is None else copies[node] for node in results))
    # A tensor that stood for a size in the trace becomes a size again, see _fake_input(). Not
    # strict: tangents follow the inputs.
    for node, source in zip(graph.find_nodes(op="placeholder"), region.placeholders, strict=False):
        if isinstance(source.meta["val"], torch.SymInt):
            node.meta["val"] = source.meta["val"]
    inline_sizes(graph)
    return JointGraph(
        graph, num_inputs, num_outputs, tuple(sorted(tangents)), region.input_kinds, region.name
    )


def _copy_placeholder(
    graph: fx.Graph, node: fx.Node, name: str, copies: dict[fx.Node, fx.Node]
) -> None:
    # Named as in the region: PyTorch's name says only that it is the n-th primal.
    copies[node] = graph.placeholder(name)
    # The descriptor and everything else in the meta are PyTorch's own.
    copies[node].meta = {"val": node.meta["val"]}


def _copy_calls(traced: fx.Graph, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    for node in traced.nodes:
        if node.op == "get_attr":
            copies[node] = effects.copied_constant(node, graph)
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            # Instead of "getitem_7", since the generated code shows these names.
            if node.target is operator.getitem:
                source, index = node.args
                names = RESULT_NAMES.get(source.target, ())
                unnamed = f"{source.target.__name__.split('.')[0]}_out{index}"
                copies[node]._rename(names[index] if index < len(names) else unnamed)


def _is_tangent(node: fx.Node) -> bool:
    return isinstance(node.meta["desc"], TangentAOTInput)


def _results(traced: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Return forward outputs by output index, and gradients by input index."""
    node = traced.output_node()
    outputs: dict[int, fx.Node] = {}
    grads: dict[int, fx.Node] = {}
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):
        if isinstance(desc, GradAOTOutput):
            assert isinstance(desc.grad_of, PlainAOTInput), desc
            grads[desc.grad_of.idx] = value
        elif desc is not None:  # no descriptor: an input without gradient
            assert isinstance(desc, PlainAOTOutput), desc
            outputs[desc.idx] = value
    return outputs, grads


def _drop_no_ops(graph: fx.Graph) -> None:
    """Drop aliases and copies that keep dtype and layout: a functional graph needs none."""
    for node in list(graph.nodes):
        if node.target in _ALIASES or (node.target in COPIES and _copies_nothing(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            report_of(Pass.JOINT).rewrote(kind="copy dropped")
    erase_dead(graph)


def _copies_nothing(node: fx.Node) -> bool:
    source, result = node.args[0].meta["val"], node.meta["val"]
    # The copies of outputs were made only for the trace, see _Interpreted: no node of the region is
    # their source. They are dropped whatever the strides.
    is_output_copy = _SOURCE not in node.meta.get("custom", {}) and all(
        user.op == "output" for user in node.users
    )
    same = source.dtype == result.dtype and source.device == result.device
    return same and (is_output_copy or source.stride() == result.stride())


def _copy_provenance(joint: JointGraph, region: Region) -> None:
    """Copy meta from the region's nodes to the nodes traced from them, including gradients."""
    sources = {node.name: node for node in region.module.graph.nodes}
    # A gradient has the source of its forward node, but neither its placement nor its shape.
    backward = joint.backward_nodes()
    for node, source in zip(joint.inputs, region.placeholders, strict=True):
        node.meta["source"] = source.name
        node.meta["root"] = source.meta.get("source", source.name)
        _copy_keys(node, source, ("placement", "nn_module_stack", "stack_trace"))
    values: dict[str, fx.Node] = {}
    for node in joint.graph.nodes:
        name = node.meta.pop("custom", {}).get(_SOURCE)
        if name is None:
            continue
        node.meta["source"] = name
        node.meta["root"] = sources[name].meta.get("source", name)
        _copy_keys(node, sources[name], ("nn_module_stack", "stack_trace"))
        if _relabels(sources[name]):
            node.meta["relabels"] = True
        # An operator may be traced as several: the last forward node of its shape has its value.
        if node not in backward and _same_shape(node, sources[name]):
            values[name] = node
    for name, node in values.items():
        _copy_keys(node, sources[name], ("placement",))


def _relabels(node: fx.Node) -> bool:
    """Return whether a view leaves one rank's part unchanged but changes the global tensor."""
    source = node.args[0] if node.args else None
    if node.target is not aten.reshape.default or not isinstance(source, fx.Node):
        return False
    if node.meta.get("placement") == source.meta.get("placement"):
        return False
    return _same_shape(node, source) or _is_spread(node) or _is_spread(source)


def _is_spread(node: fx.Node) -> bool:
    """Return whether a rank has one element per segment, such as one head each."""
    placement = node.meta.get("placement")
    return bool(placement and placement.segments) and (
        node.meta["val"].shape[placement.dim] == len(placement.segments)
    )


def _copy_keys(node: fx.Node, source: fx.Node, keys: Sequence[str]) -> None:
    for key in keys:
        node.meta.pop(key, None)
        if key in source.meta:
            node.meta[key] = source.meta[key]


def _same_shape(node: fx.Node, source: fx.Node) -> bool:
    value, other = node.meta.get("val"), source.meta.get("val")
    return (
        isinstance(value, Tensor)
        and isinstance(other, Tensor)
        and same_shape(value.shape, other.shape)
    )
