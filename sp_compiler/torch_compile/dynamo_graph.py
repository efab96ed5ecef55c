"""Conversion of a graph of ``torch.compile`` to a module that can be captured like a user's
model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback

from sp_compiler.base.errors import SPCompilerError, UnsupportedError
from sp_compiler.base.provenance import source_line
from sp_compiler.base.warn import warn

InputKind = Literal["param", "buffer", "number", "value"]

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_INVOKE = torch.ops.higher_order.invoke_subgraph
_FMA = "prims.fma.default"  # by name: not all versions of torch have it
# The steps of an expression such as ``L['self']._modules['layers']._modules['0'].weight``.
_STEP = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]|([A-Za-z_]\w*|\d+)")
# Its first step, if it is a module: ``L`` is for locals of the function that dynamo traces.
_ROOT = re.compile(r"[LG]\['[^']+'\](?=\.|$)")
# Functions of torch that all derivatives of ``torch.func`` call first.
_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")
# torch internals: how dynamo writes contexts, by what the model has written.
_ENTERED = {
    torch.amp.autocast_mode._enter_autocast: torch.autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.inference_mode,
}
_LEFT = (torch.amp.autocast_mode._exit_autocast, torch.autograd.grad_mode._exit_inference_mode)
# Functions that :func:`~sp_compiler.base.autocast.explicit_casts` patches by their names.
_PATCHED = {
    torch.inner: (torch, "inner"),
    torch.linalg.multi_dot: (torch.linalg, "multi_dot"),
}
# An argument of :meth:`GraphModel.forward` as the capture calls it.
_CAPTURED = re.compile(r"'tensors_(\d+)'")
_TABLES = ("_modules", "_parameters", "_buffers")
# How dynamo writes a table of a forward that reads ``self.__dict__``.
_OWN_TABLE = re.compile(rf"\.__dict__\['({'|'.join(_TABLES)})'\]")


@dataclass(frozen=True)
class BoundInputs:
    """The arguments of one call: full parameters and buffers by name, and all other values."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    values: list[Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class GraphIdentity:
    """What tells graphs apart, the same for equal graphs on every rank.

    Attributes:
        fingerprint: a hash of its code and of its inputs.
        shapes: names and shapes of its parameters; the fingerprint covers them too.
    """

    fingerprint: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(compare=False)

    def __str__(self) -> str:
        return self.fingerprint


@dataclass(frozen=True)
class DynamoGraph:
    """Graph that dynamo passes to a backend; parameters and buffers are among its inputs.

    Attributes:
        module: graph of torch functions and methods; ``nn_module_stack`` has dotted paths.
        kinds: kind of each input, in order; a "number" is a Python float that dynamo passes as a
            tensor.
        names: unique dotted names of parameters and buffers in the user's model; values have the
            placeholders' names.
        sources: dynamo's expression of each input, such as ``L['x']``.
        identity: what tells it apart from other graphs.
    """

    module: GraphModule
    kinds: tuple[InputKind, ...]
    names: tuple[str, ...]
    sources: tuple[str, ...]
    identity: GraphIdentity

    @classmethod
    def of(cls, module: GraphModule, example_inputs: Sequence[Any]) -> DynamoGraph:
        """Read ``module`` while it has dynamo's annotations; paths are rewritten in place.

        Raises:
            UnsupportedError: it differentiates, or an input is neither a tensor nor a number.
        """
        _refuse_derivatives(module)
        nodes = module.graph.find_nodes(op="placeholder")
        # Read now: dynamo drops its annotations once the backend has returned, but the graph is
        # compiled at its first call.
        sources = [_source(node) for node in nodes]
        kinds = tuple(map(_kind, nodes, example_inputs, sources))
        bodies = [body for body in module.modules() if isinstance(body, GraphModule)]
        root = _own_root(bodies, kinds, sources)
        names = _unique_names(nodes, kinds, sources, root)
        for body in bodies:
            _dot_module_paths(body, root)
        if module.graph.find_nodes(op="call_function", target=_CHECKPOINT):
            # A user who has set the flag for less memory should know that it has no effect.
            warn(
                "gradient checkpointing inside the model is ignored: recompute= of sp_compiler "
                "governs"
            )
        identity = _identity(module, kinds, names, example_inputs)
        return cls(module, kinds, names, tuple(sources), identity)

    def value_sources(self) -> list[str]:
        """Return dynamo's expressions of the inputs that are neither parameters nor buffers."""
        named = zip(self.kinds, self.sources, strict=True)
        return [source for kind, source in named if kind in ("number", "value")]

    def bind(self, args: Sequence[Any]) -> BoundInputs:
        """Return the arguments of a call by kind."""
        bound = BoundInputs({}, {}, [])
        for kind, name, arg in zip(self.kinds, self.names, args, strict=True):
            if kind == "param":
                bound.params[name] = arg
            elif kind == "buffer":
                bound.buffers[name] = arg
            else:
                bound.values.append(arg.item() if kind == "number" else arg)
        return bound

    def as_model(self, bound: BoundInputs) -> GraphModel:
        """Return a module that owns these parameters and buffers, for ``bound.tensors``."""
        return GraphModel(self, bound)


@dataclass
class _Seen:
    """Results of a run; a separate object, because export undoes assignments to a module's
    attributes."""

    returned_inputs: dict[int, int] = field(default_factory=dict)


class GraphModel(nn.Module):
    """Runs a dynamo graph node by node, so that a trace of it keeps modules and source lines.

    Outputs that are inputs themselves (a buffer changed in place) are returned as ``None``.
    """

    def __init__(self, graph: DynamoGraph, bound: BoundInputs) -> None:
        super().__init__()
        self._sp_seen = _Seen()
        self._sp_module = (graph.module,)  # in a tuple: not a submodule
        self._sp_slots: list[tuple[nn.Module, str] | None] = []
        for kind, name in zip(graph.kinds, graph.names, strict=True):
            if kind in ("number", "value"):
                self._sp_slots.append(None)
                continue
            path, _, leaf = name.rpartition(".")
            owner = _submodule(self, path)
            if kind == "param":
                owner._parameters[leaf] = bound.params[name]  # type: ignore[assignment]
            else:
                owner._buffers[leaf] = bound.buffers[name]
            self._sp_slots.append((owner, leaf))
        # Numbers are part of the captured graph; dynamo turns them into inputs when they change.
        self._sp_values = [None if isinstance(v, Tensor) else (v,) for v in bound.values]
        outer = [s for s, slot in zip(graph.sources, self._sp_slots, strict=True) if slot is None]
        self._sp_sources = [
            s for s, value in zip(outer, self._sp_values, strict=True) if value is None
        ]

    @property
    def returned_inputs(self) -> dict[int, int]:
        """Map from positions of outputs that are inputs to these inputs; known after a run."""
        return self._sp_seen.returned_inputs

    def in_dynamos_words(self, error: SPCompilerError) -> SPCompilerError:
        """Return an error of the capture in which dynamo's expressions of inputs replace their
        names in :meth:`forward`."""
        return type(error)(_CAPTURED.sub(lambda match: self._sp_sources[int(match[1])], str(error)))

    def forward(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        values = iter([next(rest) if value is None else value[0] for value in self._sp_values])
        args = [next(values) if slot is None else getattr(*slot) for slot in self._sp_slots]
        with fx_traceback.preserve_node_meta():
            outputs = list(_InliningInterpreter(self._sp_module[0]).run(*args))
        position = {id(arg): index for index, arg in enumerate(args) if isinstance(arg, Tensor)}
        returned = self._sp_seen.returned_inputs = {
            index: position[id(out)] for index, out in enumerate(outputs) if id(out) in position
        }
        return tuple(None if index in returned else out for index, out in enumerate(outputs))


class _InliningInterpreter(Interpreter):
    """Runs the bodies of checkpointed and marked regions inline.

    ``item()`` of a float that dynamo passes as a tensor returns the number, since
    :meth:`DynamoGraph.bind` has converted it already. Contexts are entered as by the model itself:
    while a trace is recorded, dynamo's functions for them would do nothing.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._entered: list[Any] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; an error leaves all contexts."""
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._entered:
                self._entered.pop().__exit__(None, None, None)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _ENTERED:
            self._entered.append(_ENTERED[target](*args, **kwargs))
            self._entered[-1].__enter__()
            return self._entered[-1]
        if target in _LEFT:
            self._entered.remove(args[0])
            return args[0].__exit__(None, None, None)
        if str(target) == _FMA and not isinstance(args[1], Tensor):  # of addcmul_(value=...)
            return torch.add(args[2], args[0], alpha=args[1])
        if target in _PATCHED:  # dynamo holds the original
            target = getattr(*_PATCHED[target])
        # Higher-order operators would be opaque to the passes; recompute= decides anyway.
        if target is _CHECKPOINT:
            return _InliningInterpreter(args[0]).run(*args[1:])
        if target is _INVOKE:
            return _InliningInterpreter(args[0]).run(*args[2:])
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and not isinstance(args[0], Tensor):
            return args[0]
        return super().call_method(target, args, kwargs)


def _refuse_derivatives(module: GraphModule) -> None:
    # Before any of it runs, which would leave hooks on saved tensors disabled in this process.
    nodes = iter(module.graph.nodes)
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in nodes):
        # Dynamo records no line for that function itself.
        line = next(filter(None, map(source_line, nodes)), "")
        raise UnsupportedError(
            "forward differentiates with torch.func (grad, vjp, jvp, jacrev, ...), which cannot be "
            f"captured: {line}; write the derivative by hand, or compute it outside of the "
            "compiled function (torch.autograd.grad)"
        )


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the module at ``path`` below ``root``, made if necessary."""
    for step in path.split(".") if path else ():
        if step not in root._modules:
            root._modules[step] = nn.Module()
        root = root._modules[step]  # type: ignore[assignment]
    return root


def _source(node: Node) -> str:
    """Return dynamo's source expression of an input, such as ``L['self'].weight``."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = source.name
    return _OWN_TABLE.sub(r".\1", str(name() if callable(name) else name))


def _kind(node: Node, example: Any, source: str) -> InputKind:
    if not isinstance(example, Tensor):
        if not isinstance(example, (bool, int, float, torch.SymInt, torch.SymFloat)):
            raise UnsupportedError(
                f"an input of the compiled graph ({source}) is a {type(example).__name__}; tensors "
                "and numbers are supported"
            )
        return "value"
    # A float that changes between calls: part of the key, since the graph is traced with it.
    if getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
        return "number"
    if isinstance(example, nn.Parameter):
        return "param"
    return "buffer" if "._buffers[" in source else "value"


def _own_root(
    bodies: Sequence[GraphModule], kinds: Sequence[InputKind], sources: Sequence[str]
) -> str:
    """Return the expression of the compiled module: ``L['self']``, or another name of the first
    argument of its forward; "" for a function of several modules."""
    stacks = [
        node.meta.get("nn_module_stack") or {} for body in bodies for node in body.graph.nodes
    ]
    paths = {path for stack in stacks for path, _ in stack.values()}
    owned = [s for s, kind in zip(sources, kinds, strict=True) if kind in ("param", "buffer")]
    matches = map(_ROOT.match, (*paths, *(source for source in owned if "." in source)))
    roots = {match[0] for match in matches if match}
    # Other modules, arguments or globals, are in ``paths``, since they are called.
    own = roots if len(roots) == 1 else {each for each in roots - paths if each[0] == "L"}
    return own.pop() if len(own) == 1 else ""


def _unique_names(
    nodes: Sequence[Node], kinds: Sequence[InputKind], sources: Sequence[str], root: str
) -> tuple[str, ...]:
    """Return dotted names; the placeholder's own name if one is taken or the prefix of another."""
    dotted = [
        dotted_path(source, root) if kind in ("param", "buffer") else node.name
        for node, kind, source in zip(nodes, kinds, sources, strict=True)
    ]
    taken: set[str] = set()
    names = []
    for node, name in zip(nodes, dotted, strict=True):
        inside = any(other.startswith(f"{name}.") for other in dotted)
        names.append(node.name if not name or name in taken or inside else name)
        # Two inputs with the same name may be one tensor that dynamo found by two paths.
        taken.add(names[-1])
    return tuple(names)


def dotted_path(expression: str, root: str) -> str:
    """Return ``layers.0.weight`` for ``L['self']._modules['layers']._modules['0']`` and so on.

    The module ``root`` (here ``L['self']``) is dropped; otherwise only the scope is (``L`` for
    locals, ``G`` for globals).
    """
    inner = expression.removeprefix(root)
    steps = [quoted or plain for quoted, plain in _STEP.findall(inner)]
    if inner[:2] in ("L[", "G["):
        steps = steps[1:]
    return ".".join(step.replace(".", "_") for step in steps if step not in _TABLES)


def _dot_module_paths(module: GraphModule, root: str) -> None:
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (dotted_path(path, root), kind) for key, (path, kind) in stack.items()
            }


def _identity(
    module: GraphModule,
    kinds: Sequence[InputKind],
    names: Sequence[str],
    example_inputs: Sequence[Any],
) -> GraphIdentity:
    inputs = list(zip(kinds, names, example_inputs, strict=True))
    shapes = {name: tuple(example.shape) for kind, name, example in inputs if kind == "param"}
    # Includes the bodies of checkpointed regions, which the outer code only names.
    text = [body.code for body in module.modules() if isinstance(body, GraphModule)]
    # Shapes of values are part of each call's key; those of parameters never change.
    text += [f"{kind} {name} {shapes.get(name, '')}" for kind, name, _ in inputs]
    fingerprint = hashlib.sha256("\n".join(text).encode()).hexdigest()
    return GraphIdentity(fingerprint, tuple(shapes.items()))
