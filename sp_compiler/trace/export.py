"""Capture of a model and its example inputs as one functional graph of composite ATen operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from sp_compiler.base.autocast import without_autocast
from sp_compiler.base.errors import CaptureError, UnsupportedError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import calls, module_of
from sp_compiler.ir.hints import parameters_of
from sp_compiler.ir.program import Ref
from sp_compiler.ir.rewriting import erase_dead, fake_mode_of, make_call, refake, set_value
from sp_compiler.ir.symbolic import NotSymbolic, inline_sizes, is_open, open_sizes
from sp_compiler.trace.arguments import refuse_inputs, sorted_keywords, unordered_keywords
from sp_compiler.trace.attributes.changes import Settled
from sp_compiler.trace.decisions import Reads
from sp_compiler.trace.environment import check_capturable
from sp_compiler.trace.exporting import Export, ExportRun, open_shapes, refuse_text
from sp_compiler.trace.graph_checks import check_dtypes, refuse_layouts, refuse_subgraphs
from sp_compiler.trace.lift_casts import lift_casts_to_float64
from sp_compiler.trace.masked_rows import compute_all_rows
from sp_compiler.trace.strides import index_strided

_aten = torch.ops.aten


def flatten_inputs(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    unordered: Container[str] | None = None,
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves and the pytree structure of a call's inputs, independent of the order of
    the keyword arguments in ``unordered``; ``None``: of all keyword arguments."""
    named = sorted_keywords(kwargs or {}, unordered)
    leaves = [*args, *named.values()]
    # Nearly every call of a training loop: there are no nested structures.
    if all(type(leaf) is Tensor for leaf in leaves):
        return leaves, _structure_of_tensors(len(args), tuple(named))
    return pytree.tree_flatten((tuple(args), named))


@functools.lru_cache(maxsize=256)
def _structure_of_tensors(num_args: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    return pytree.tree_structure(((0,) * num_args, dict.fromkeys(names, 0)))


def input_names(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the names that a user knows the leaves of :func:`flatten_inputs` by: ``x``,
    ``batch['ids']``."""
    named = sorted_keywords(kwargs or {}, unordered_keywords(model.forward))
    paths, _ = pytree.tree_flatten_with_path((tuple(args), named))
    positional = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = []
    # The first step of a path is args or kwargs, the second the argument.
    for (_, argument, *inside), _ in paths:
        key = getattr(argument, "key", getattr(argument, "idx", None))
        if isinstance(key, int):
            key = positional[key] if key < len(positional) else f"args[{key}]"
        names.append(f"{key}{pytree.keystr(tuple(inside))}")
    return names


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    lift_casts: bool = False,
    open_dims: bool = False,
) -> Captured:
    """Export ``model`` on example inputs, in the current mode (train or eval, autocast).

    Args:
        model: unmodified; its parameters may live on the ``meta`` device.
        args: example positional arguments; only the shapes and dtypes of tensors matter, except for
            values that forward reads.
        kwargs: example keyword arguments.
        lift_casts: in a float64 model, compute everything in float64, for comparisons without the
            model's own rounding to float32.
        open_dims: leave the sizes of input dims open if the model allows it.

    Raises:
        CaptureError: the forward failed or its control flow depends on parameters or activations.
        UnsupportedError: hooks inside the model, operators with subgraphs, text made of tensors.
        NotSymbolic: with ``open_dims``, if the model returns a size.
    """
    check_capturable(model)
    unordered = unordered_keywords(model.forward)
    leaves, in_spec = flatten_inputs(args, kwargs, unordered)
    names = input_names(model, args, kwargs)
    refuse_inputs(names, leaves)
    leaves = _as_examples(leaves, model, open_dims)
    example_args, example_kwargs = pytree.tree_unflatten(leaves, in_spec)
    # An argument overrides the config: export_context switches off only the config's.
    use_cache = example_kwargs.get("use_cache")
    if use_cache is True:
        example_kwargs = {**example_kwargs, "use_cache": False}
    shapes = open_shapes(model, example_args, example_kwargs) if open_dims else None
    real_leaves, _ = flatten_inputs(args, kwargs, unordered)
    run = ExportRun(model, example_args, example_kwargs, shapes, use_cache, real_leaves, names)

    def attempt() -> tuple[Captured, Settled]:
        export, settled = run.settled(run.run())
        # The graph has the casts of autocast now; running its operators must not cast again.
        with without_autocast():
            captured = _captured(export, model, in_spec, leaves, lift_casts, open_dims)
        captured.functions = export.functions
        captured.decisions = export.reads.decisions
        return captured, settled

    captured, settled = run.attempted(attempt)
    captured.stored = settled.stored
    refuse_text([*captured.outputs, *(leaf for each in settled.stored for leaf in each.leaves)])
    captured.notes += [f"holds for {decision}" for decision in captured.decisions]
    # Last, since only now do all values have the dtypes that kernels will see.
    check_dtypes(captured.module.graph, dict(zip(names, leaves, strict=True)))
    return captured


def _captured(
    export: Export,
    model: nn.Module,
    in_spec: pytree.TreeSpec,
    leaves: list[Any],
    lift_casts: bool,
    open_dims: bool,
) -> Captured:
    exported = export.exported
    index_strided(exported.graph_module.graph)  # while strides are those of the model's own code
    # Placeholders get their final form before values are propagated from them.
    compute_all_rows(exported.graph_module.graph)
    inline_sizes(exported.graph_module.graph)
    captured = _from_exported(exported, model, in_spec)
    captured.parameters = parameters_of(model)
    if open_dims:
        _add_sizes(captured, leaves)
    captured.drop_unused_placeholders()
    _make_fake(captured, leaves, model)
    if lift_casts:
        lift_casts_to_float64(captured)
    # view -> reshape: strides depend on the kernels, which are not those of the export, and a view
    # that is valid for the strides of one kernel may not be for those of another.
    for node in calls(captured.module.graph, _aten.view.default, _aten._unsafe_view.default):
        node.target = _aten.reshape.default
    _propagate(captured.module.graph, export.reads)
    return captured


def _add_sizes(captured: Captured, leaves: Sequence[Any]) -> None:
    """Find the open dims, and insert a placeholder for each before the others."""
    inputs = {
        ref.index: node
        for node, ref in zip(captured.placeholders, captured.refs, strict=True)
        if ref.kind == "input"
    }
    graph = captured.module.graph
    env = fake_mode_of(graph).shape_env
    if env is None:
        raise NotSymbolic("export made no symbols")
    if any(map(is_open, pytree.tree_leaves(graph.output_node().args))):
        raise NotSymbolic("the model returns a size as a number")
    sizes = open_sizes(inputs, leaves, env)
    first = captured.placeholders[0]
    refs = []
    for size in sizes.distinct:
        with graph.inserting_before(first):
            node = graph.placeholder(size.name)
        # First, so that a signature begins with the symbols in which its shapes are written.
        node.meta = {"val": size.value, "requires_grad": False}
        refs.append(Ref("size", size.name, size.leaf, size.dim))
    captured.refs = [*refs, *captured.refs]
    captured.sizes = sizes if refs else None


def _as_examples(leaves: list[Any], model: nn.Module, open_dims: bool) -> list[Any]:
    """Return leaves for export: fresh tensors, on the meta device if the model is there.

    They are never the caller's own tensors: export leaves marks on its inputs, and reads ``grad``
    of tensors that are not leaves. Clones are made of a tensor that is passed twice (labels and
    input ids), because export would merge the two inputs; of one that shares memory with another,
    because a write to either would have to be visible in both; and of one created in inference
    mode, for which autograd cannot record anything.
    """
    meta = any(parameter.is_meta for parameter in model.parameters())
    seen: set[Any] = set()
    examples = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            is_strided = leaf.layout is torch.strided  # other layouts have no storage
            memory = StorageWeakRef(leaf.untyped_storage()) if is_strided else id(leaf)
            is_new = memory not in seen and not leaf.is_inference()
            seen.add(memory)
            with torch.inference_mode(False):
                example = leaf.detach() if is_new else leaf.detach().clone()
                example = example.to("meta") if meta else example
                # The stride of a slice such as ids[:, :-1] would be an open size that no dim has.
                example = example.contiguous() if open_dims and is_strided else example
                leaf = example.requires_grad_(leaf.requires_grad)
        examples.append(leaf)
    return examples


def _from_exported(
    exported: ExportedProgram, model: nn.Module, in_spec: pytree.TreeSpec
) -> Captured:
    """Turn the signature of an exported graph into refs, and merge tied tensors."""
    graph = exported.graph_module.graph
    canonical = _canonical_names(model)
    leaf_order = iter(_leaf_order(exported, in_spec))
    aliases: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    refs: list[Ref] = []
    first: dict[Ref, Node] = {}
    specs = exported.graph_signature.input_specs
    # A tied tensor has several placeholders: all uses move to the first, whose name is the one
    # under which the parameter is stored.
    for node, spec in zip(graph.find_nodes(op="placeholder"), specs, strict=True):
        ref = _ref_of(spec, canonical, leaf_order)
        if ref.kind in ("param", "buffer") and ref.name != spec.target:
            aliases[str(spec.target)] = ref.name
        if ref.kind == "constant":
            constants[ref.name] = exported.constants[ref.name]
        node.replace_all_uses_with(first.setdefault(ref, node))
        refs.append(ref)
    mutated = _mutated_last(graph.output_node(), exported.graph_signature.output_specs, canonical)
    # After the model's own output, the exported forward returned what it stores in attributes.
    out_spec = exported.call_spec.out_spec.child(0)
    erase_dead(graph)
    refuse_subgraphs(graph)
    refuse_layouts(graph)
    captured = Captured(module_of(graph), refs, in_spec, out_spec)
    captured.mutated, captured.aliases, captured.constants = mutated, aliases, constants
    return captured


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its first name in ``model``."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _leaf_order(exported: ExportedProgram, in_spec: pytree.TreeSpec) -> list[int]:
    """Return for each input leaf of the exported program its index among those of ``in_spec``."""
    # Export may order keyword arguments differently: indices are unflattened by both specs.
    spec = exported.call_spec.in_spec
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    _, names = pytree.tree_unflatten(range(spec.num_leaves), in_spec)
    exported_positions = pytree.tree_leaves((args, {name: kwargs[name] for name in names}))
    order = [0] * len(exported_positions)
    for sorted_position, exported_position in enumerate(exported_positions):
        order[exported_position] = sorted_position
    return order


def _ref_of(spec: InputSpec, canonical: dict[str, str], leaf_order: Iterator[int]) -> Ref:
    target = str(spec.target)
    if spec.kind is InputKind.PARAMETER:
        return Ref("param", canonical[target])
    if spec.kind is InputKind.BUFFER:
        return Ref("buffer", canonical[target])
    if spec.kind is InputKind.CONSTANT_TENSOR:
        return Ref("constant", target)
    if spec.kind is InputKind.USER_INPUT:
        return Ref("input", index=next(leaf_order))
    raise UnsupportedError(
        f"the model uses an object that cannot be captured: {spec.kind} {target}"
    )


def _mutated_last(
    output: Node, specs: Sequence[OutputSpec], canonical: dict[str, str]
) -> list[str]:
    """Order the returned values: the model's outputs, then mutated buffers; returns their names.

    New values of buffers are detached: no gradient flows through a buffer.
    """
    results, written, names = [], [], []
    for value, spec in zip(output.args[0], specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            with output.graph.inserting_before(output):
                detach, meta = _aten.detach.default, {"val": value.meta["val"]}
                where: Any = {"like": value, "origin": Pass.EXPORT, "meta": meta}
                written.append(make_call(output.graph, detach, (value,), **where))
            names.append(canonical[str(spec.target)])
        else:
            what = f"the parameter {spec.target!r}, as max_norm of an embedding does"
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                what = f"its input {spec.target!r}"
            raise UnsupportedError(
                f"the forward writes into {what}; only buffers may be written: write into a copy "
                "instead\n" + node_origin(value)
            )
    output.args = ((*results, *written),)
    return names


def _propagate(graph: Graph, reads: Reads) -> None:
    """Compute every value's shape, dtype and whether it requires a gradient."""
    # Export's own values have another fake mode, and do not say what requires a gradient.
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            refake(node, mode)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if node.target is _aten.item.default and reads.refused is not None:
                raise CaptureError(
                    f"{reads.text()}; compute with the tensor itself (torch.where) instead\n"
                    f"{node_origin(node)}"
                ) from error
            raise CaptureError(
                f"the shape of a value depends on the values in a tensor ({node.target}); use "
                f"masks and torch.where in place of boolean indexing\n{node_origin(node)}"
            ) from error


def _make_fake(captured: Captured, leaves: list[Any], model: nn.Module) -> None:
    """Give every placeholder a value in one new fake mode; the ``meta`` device becomes the CPU."""
    # One new mode for all values: export's fake tensors have its own mode.
    mode = FakeTensorMode(shape_env=captured.sizes.env if captured.sizes is not None else None)
    parameters = dict(model.named_parameters())
    for node, ref in zip(captured.placeholders, captured.refs, strict=True):
        if ref.kind == "size":
            continue
        example = node.meta["val"]
        device = torch.device("cpu") if example.is_meta else example.device
        with mode:
            value = torch.empty_strided(
                example.shape, example.stride(), dtype=example.dtype, device=device
            )
        requires_grad = False
        if ref.kind == "param":
            requires_grad = parameters[ref.name].requires_grad
        elif ref.kind == "input":
            requires_grad = leaves[ref.index].requires_grad
        set_value(node, value.requires_grad_(requires_grad))
    # Fakes of the meta device would lose gradients in the joint trace.
    if any(parameter.is_meta for parameter in parameters.values()):
        _move_to_cpu(captured.module.graph)


def _move_to_cpu(graph: Graph) -> None:
    """Make a graph that was captured on the ``meta`` device run on the CPU."""
    for node in list(graph.nodes):
        if node.op == "call_function" and getattr(node.kwargs.get("device"), "type", "") == "meta":
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    for node in calls(graph, _aten.histc.default):
        source = node.args[0]
        assert isinstance(source, Node)
        dtype = source.meta["val"].dtype
        # The CPU has no kernel for integers. Models with experts cast only on the CPU, so they did
        # not on the meta device.
        if not dtype.is_floating_point:
            to = _aten._to_copy.default
            cast = functools.partial(make_call, graph, to, like=node, origin=Pass.EXPORT)
            with graph.inserting_before(node):
                node.replace_input_with(source, cast((source,), {"dtype": torch.float32}))
            with graph.inserting_after(node):
                back = cast((node,), {"dtype": dtype})
            node.replace_all_uses_with(back, lambda user, back=back: user is not back)
