"""Functions of the model with their own backward (``torch.autograd.Function``).

Export would trace through their forward and lose their backward. Therefore the capture records each
call as the operator ``sp_compiler_function::apply``, whose kernel is composite: when a region is
differentiated, the function itself runs again, and the operators of its forward and backward are
traced like any others.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from sp_compiler.base.autocast import Autocast, autocast_state, under_autocast
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ir.symbolic import SYMBOLIC

_library = torch.library.Library("sp_compiler_function", "DEF")
_library.define("apply(Tensor[] inputs, int call) -> Tensor[]")
_APPLY = torch.autograd.Function.__dict__["apply"]
_Base: Any = torch.autograd.function._SingleLevelFunction
_NOT_FAKE = "Please convert all Tensors to FakeTensors"  # torch's assertion
_IS_RUNNING = ContextVar("a recorded function runs", default=False)

# Operators that pointwise functions may use in addition to those that torch tags as pointwise.
_KEEP_SHAPE = frozenset(
    {
        "clone",
        "detach",
        "alias",
        "_to_copy",
        "ones_like",
        "zeros_like",
        "full_like",
        "scalar_tensor",
    }
)
_TENSOR = object()  # in place of a tensor among returned leaves
# Operators that turn a constant of the code into a tensor.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# Two shapes of each rank that share no size: a number computed from a size differs between them.
_PROBES = ((3, 5, 7, 11, 13, 17), (4, 6, 8, 10, 12, 14))


@dataclass(eq=False)
class FunctionCall:
    """One call of such a function in a model's forward, without its tensors.

    Attributes:
        function: the user's class.
        spec: pytree structure of ``(args, kwargs)``.
        leaves: the leaves of ``(args, kwargs)``, with ``None`` for each tensor.
        positions: positions of the tensors among the leaves.
        autocast: the autocast states that were active around the call.
        returned: the leaves that the function returned, with ``_TENSOR`` for tensors, and their
            structure.
        pointwise: by rank and dtypes of the operands, whether it is pointwise; filled on demand.
    """

    function: type[torch.autograd.Function]
    spec: pytree.TreeSpec
    leaves: list[Any]
    positions: list[int]
    autocast: Autocast = ()
    returned: tuple[list[Any], pytree.TreeSpec] | None = None
    pointwise: dict[tuple[int, tuple[torch.dtype, ...]], bool] = field(default_factory=dict)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call the function itself; returns the tensors among its results."""
        leaves = list(self.leaves)
        for position, value in zip(self.positions, inputs, strict=True):
            leaves[position] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        # The autocast around the call: the casts inside the function are not in the graph yet.
        # The original ``apply``: the patched one would record the call again.
        run = _APPLY.__get__(None, self.function)
        token = _IS_RUNNING.set(True)
        try:
            with under_autocast(self.autocast):
                result = run(*args, **kwargs)
        finally:
            _IS_RUNNING.reset(token)
        leaves, spec = pytree.tree_flatten(result)
        self.returned = [_TENSOR if isinstance(x, Tensor) else x for x in leaves], spec
        return [x for x in leaves if isinstance(x, Tensor)]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Rebuild the function's own result around ``outputs``."""
        assert self.returned is not None
        leaves, spec = self.returned
        values = iter(outputs)
        returned = [next(values) if leaf is _TENSOR else leaf for leaf in leaves]
        return pytree.tree_unflatten(returned, spec)


# An operator can take only numbers and tensors, so a graph refers to a call by number. The captures
# and programs with these graphs own the calls, which are freed with them.
_CALLS: WeakValueDictionary[int, FunctionCall] = WeakValueDictionary()
_NUMBERS = itertools.count()


def _kernel(inputs: list[Tensor], call: int) -> list[Tensor]:
    return _CALLS[call].run(inputs)


_library.impl("apply", _kernel, "CompositeImplicitAutograd")


def numbers_of_calls(graph: Graph) -> list[int]:
    """Return the numbers of the recorded calls in ``graph``."""
    target = torch.ops.sp_compiler_function.apply.default
    return [node.args[1] for node in graph.find_nodes(op="call_function", target=target)]


@contextlib.contextmanager
def attributes_kept(calls: Iterable[int]) -> Iterator[None]:
    """Context after which the functions of ``calls`` have the attributes that they had before it.

    A function may store a tensor in its class, such as a scale of gradients. While it is traced,
    that would be a fake tensor, on which the model itself would fail.

    Raises:
        UnsupportedError: a backward reads a tensor that was stored before.
    """
    before = {_CALLS[call].function: dict(vars(_CALLS[call].function)) for call in calls}
    try:
        yield
    except AssertionError as error:
        if not before or _NOT_FAKE not in str(error):
            raise
        names = ", ".join(function.__name__ for function in before)
        raise UnsupportedError(
            f"the backward of a torch.autograd.Function ({names}) uses a tensor that it is not "
            "given, such as an attribute of its class; pass it to apply(), and save it in forward"
        ) from error
    finally:
        for function, attributes in before.items():
            for name in vars(function).keys() - attributes.keys():
                delattr(function, name)
            for name, value in attributes.items():
                if vars(function)[name] is not value:
                    setattr(function, name, value)


def function_name(call: int) -> str:
    """Return the name of the user's class."""
    return _CALLS[call].function.__name__


def may_be_same(one: int, other: int) -> bool:
    """Return whether two numbers may refer to equal calls: functions of the same name with the same
    plain constants. Calls that no longer exist may be equal to any."""
    if one == other or one not in _CALLS or other not in _CALLS:
        return True
    first, second = _CALLS[one], _CALLS[other]
    constants = [
        [repr(leaf) if isinstance(leaf, (int, float, str)) else type(leaf) for leaf in call.leaves]
        for call in (first, second)
    ]
    return function_name(one) == function_name(other) and constants[0] == constants[1]


@contextlib.contextmanager
def recorded_functions() -> Iterator[list[FunctionCall]]:
    """Record calls of autograd functions as operators; yields the list of calls."""
    recorded: list[FunctionCall] = []

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return _record(recorded, function, args, kwargs)

    def apply_bound(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _IS_RUNNING.get():
            return super(_Base, function).apply(*args, **kwargs)
        return apply(function, *args, **kwargs)

    # torch internals: Function.apply. Export traces through it, and the derivative of the forward
    # would replace the function's; there is no hook to intercept the call. A model may have stored
    # the bound method (``swish = Swish.apply``) before: that one calls the method of the base.
    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(_Base, "apply", classmethod(apply_bound), create=True),
    ):
        yield recorded


def _record(
    recorded: list[FunctionCall],
    function: type[torch.autograd.Function],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if function is CheckpointFunction:
        return _without_checkpoint(*args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inputs = [leaves[index] for index in positions]
    if any(isinstance(leaf, SYMBOLIC) for leaf in leaves):
        raise UnsupportedError(f"{function.__name__} is given a size, which cannot stay open")
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    number, call = numbered(FunctionCall(function, spec, constants, positions, autocast_state()))
    recorded.append(call)
    # torch internals: _version, which every write into a tensor increments; there is no other sign
    # that a function writes into its inputs.
    versions = [x._version for x in inputs]
    with attributes_kept([number]), _Watched(function, inputs):
        outputs = torch.ops.sp_compiler_function.apply(inputs, number)
    if [x._version for x in inputs] != versions:
        raise UnsupportedError(
            f"{function.__name__}, a torch.autograd.Function, writes into its inputs; return new "
            "tensors instead"
        )
    return call.result(outputs)


def _without_checkpoint(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Call the function that is passed to the reentrant form of ``torch.utils.checkpoint``."""
    # That form is an autograd function whose forward runs the function under no_grad. Results
    # require a gradient, and parameters inside get theirs, only if an argument requires one.
    flows = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with contextlib.nullcontext() if flows else torch.no_grad():
        return run(*args)


def numbered(call: FunctionCall) -> tuple[int, FunctionCall]:
    """Return the number of ``call`` in graphs, and the call with that number, to be kept alive.

    Equal calls share a number, so that equal layers stay equal.
    """
    # A list, since a call of another capture may be garbage-collected during the iteration.
    for number, known in list(_CALLS.items()):
        if _key(call) == _key(known) and all(map(_is_same, call.leaves, known.leaves)):
            return number, known
    number = next(_NUMBERS)
    _CALLS[number] = call
    return number, call


def _key(call: FunctionCall) -> tuple[Any, ...]:
    return call.function, call.spec, call.positions, call.autocast


def _is_same(one: Any, other: Any) -> bool:
    # By text, in which NaN equals NaN and -0.0 differs from 0.0. Other objects by identity: their
    # comparison is user code.
    plain = type(one) is type(other) and isinstance(one, (int, float, str))
    return one is other or (plain and repr(one) == repr(other))


class _Watched(TorchDispatchMode):
    """Mode that refuses random numbers, which would differ in the next run, and tensors that are
    not arguments, whose gradients would be lost."""

    def __init__(self, function: type, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._name = f"{function.__name__}, a torch.autograd.Function,"
        self._known = {id(x): x for x in inputs}  # kept alive, so that no id is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedError(
                f"{self._name} draws random numbers ({func}); draw them outside of it, or call "
                "model.eval()"
            )
        used = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func not in _LIFTS and any(id(x) not in self._known for x in used):
            raise UnsupportedError(
                f"{self._name} uses a tensor that it is not given ({func}); pass it to apply()"
            )
        result = func(*args, **(kwargs or {}))
        # Results of the function's own operators may be used as well.
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self._known.update((id(x), x) for x in made)
        return result


def is_pointwise_function(call: int, rank: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Return whether forward and backward of a recorded call, with operands of equal shape, are
    pointwise.

    Both are traced at two shapes. All operators must be pointwise, on values of that shape or on
    scalars, and the same at both shapes, so that no number depends on a size.
    """
    answers = _CALLS[call].pointwise
    if (rank, dtypes) not in answers:
        answers[rank, dtypes] = rank <= len(_PROBES[0]) and _keeps_shapes(call, rank, dtypes)
    return answers[rank, dtypes]


def _keeps_shapes(call: int, rank: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    try:
        with attributes_kept([call]):
            first, second = (_traced(_CALLS[call], shape[:rank], dtypes) for shape in _PROBES)
    except Exception:  # the user's code may raise anything for shapes other than its own
        return False
    return first is not None and first == second


def _traced(
    call: FunctionCall, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]
) -> str | None:
    """Return the code of forward and backward, ``None`` if an operator is not pointwise."""

    def both(inputs: list[Tensor], tangents: list[Tensor]) -> Any:
        outputs = call.run(inputs)
        wanted = [x for x in inputs if x.requires_grad]
        given = [(y, g) for y, g in zip(outputs, tangents, strict=False) if y.requires_grad]
        if not wanted or not given:
            return outputs
        ends, grads = zip(*given, strict=True)
        return outputs, torch.autograd.grad(ends, wanted, grads, allow_unused=True)

    def example(dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x.requires_grad_(dtype.is_floating_point)

    # On the meta device: only shapes and operators matter.
    inputs = [example(dtype) for dtype in dtypes]
    with torch.no_grad():
        results = call.run(inputs)
    tangents = [torch.empty(shape, dtype=x.dtype, device="meta") for x in results]
    with torch.enable_grad():
        module = make_fx(both)(inputs, tangents)
    return module.code if all(x.shape == shape for x in results) and _pointwise(module) else None


def _pointwise(module: GraphModule) -> bool:
    (shape,) = {node.meta["val"].shape for node in module.graph.find_nodes(op="placeholder")}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            return False  # a constant tensor of the function, whose dims are unknown
        if node.op != "call_function":
            continue
        target, value = node.target, node.meta.get("val")
        name = target._schema.name.split("::")[1]
        if torch.Tag.pointwise not in target.tags and name not in _KEEP_SHAPE:
            return False
        if not isinstance(value, Tensor) or value.shape not in (shape, torch.Size()):
            return False
    return True
