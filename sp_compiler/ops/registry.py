"""The record of a custom operator: everything the rest of the compiler has to know about it.

Code that depends on the rank is a custom operator. A graph only names it, so neither a rank nor a
process group is baked into the graph. The generated code calls the kernel as a method of the
communicator, ``tp.<name>(...)``; a graph that is interpreted reaches the same kernel through
torch's dispatcher, which finds the communicator in the context
(:func:`~sp_compiler.ops.communicator.running_on`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.ops.communicator import Communicator, current_communicator, running_on

Arguments = Mapping[str, Any]
"""Arguments of a call in a graph by their names in the schema; tensors are nodes."""
Typing = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of the tensor operands and of the results. A result that is R is I where its operands
are; one that is I is so whatever they are."""


@dataclass(frozen=True)
class Collective:
    """One kind of communication.

    Attributes:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        count: how often.
        num_bytes: of the global tensors: what a gather yields, a scatter takes, a reduction
            reduces.
    """

    kind: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Gradient:
    """The two functions of :func:`torch.library.register_autograd`.

    Attributes:
        save: ``(ctx, inputs, output)``: keep in ``ctx`` what backward needs.
        backward: ``(ctx, *grads)``: a gradient, or ``None``, for every argument of the schema.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of ours, ``torch.ops.sp_compiler.<name>``.

    Attributes:
        name: also of the communicator's method.
        schema: as torch writes it. The last argument without a default is ``world_size``: tensors
            in a graph have the shapes of one rank, and from them alone a fake could not tell the
            global ones.
        kernel: computes it from a communicator and the arguments of the schema, without
            ``world_size`` unless the kernel has a parameter of this name.
        fake: the result's shape and type from the arguments of the schema.
        typings: every placement that it may be run with, from its arguments and the number of
            ranks; the checks believe them. Empty: the arguments contradict each other.
        gradient: ``None`` where nothing differentiates it.
        result_names: of several results, in the generated code.
        view: whether the kernel returns "all" or a "part" of its first argument's storage.
        placed: whether an element's value depends on where in the global tensor it stands, which
            its last arguments tell: ``dim``, the sharded one, and ``world_size``; else it is
            elementwise.
        dims: what the dims of operands and results are, in letters: ``"vh,...->...h"``. Only the
            memory formulas read it; without it they have numbers for the dims of the result.
        collectives: what the kernel sends and receives, from its result; ``None``: nothing. (Of a
            conversion :data:`~sp_compiler.ops.convert.CONVERSIONS` has it.)
        checks_numbers: whether the kernel looks at numbers on the host, to refuse wrong ones: no
            backend may compile it.
        writes: whether the kernel writes into its first argument and returns it. In a graph that
            argument has no other reader.
        scratch_bytes: memory that the kernel takes beside its result, from the arguments and the
            result.
    """

    name: str
    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    typings: Callable[[Arguments, int], Sequence[Typing]]
    gradient: Gradient | None = None
    result_names: tuple[str, ...] = ()
    view: Literal["", "all", "part"] = ""
    placed: bool = False
    dims: str = ""
    collectives: Callable[[Any], Sequence[Collective]] | None = None
    checks_numbers: bool = False
    scratch_bytes: Callable[[Arguments, Any], int] = lambda args, result: 0
    writes: bool = False

    @cached_property
    def overload(self) -> Any:
        """The target of its nodes."""
        return getattr(torch.ops.sp_compiler, self.name).default

    @cached_property
    def takes_world_size(self) -> bool:
        """Whether the kernel is told by each call over how many ranks; else its group says so."""
        return "world_size" in inspect.signature(self.kernel).parameters

    def method_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of the schema that the communicator's method takes."""
        return args if self.takes_world_size else args[:-1]

    def run(self, *args: Any) -> Any:
        """The kernel on the communicator of the context.

        Raises:
            UnsupportedError: there is none.
        """
        tp = current_communicator()
        if tp is None:
            raise UnsupportedError(
                f"sp_compiler::{self.name} depends on the rank, and none is given: run the graph "
                "inside of `with running_on(tp)`, or the generated code instead of the graph"
            )
        if self.writes:
            args = (args[0].clone(), *args[1:])
        result = self.kernel(tp, *self.method_arguments(args))
        # By storage, not identity: a kernel may return a view of what it was given.
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}

        # The schema promises autograd a result of its own, where the generated code, which needs no
        # such promise, does with the argument itself or a view.
        def own(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage()._cdata in given else x

        return tree_map_only(Tensor, own, result)


OPERATORS: dict[str, Operator] = {}
"""Every operator of ours by name."""


def operator_of(target: object) -> Operator | None:
    """The record of a node's ``target``; ``None`` where it is not one of ours."""
    if getattr(target, "namespace", "") != "sp_compiler":
        return None
    return OPERATORS[target.__name__.partition(".")[0]]  # type: ignore[attr-defined]


def register(operator: Operator) -> Operator:
    """Make ``operator`` known to torch, to the communicator and to the compiler."""
    OPERATORS[operator.name] = operator
    # The generated code calls tp.<name>: a method call, past torch's dispatcher.
    setattr(Communicator, operator.name, operator.kernel)
    definition = torch.library.custom_op(
        f"sp_compiler::{operator.name}", operator.run, mutates_args=(), schema=operator.schema
    )
    definition.register_fake(operator.fake)
    if operator.gradient is not None:
        _register_gradient(definition, operator.gradient)
    return operator


def _register_gradient(definition: Any, gradient: Gradient) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # Backward may run after the context has been left, and on a GPU in a thread of autograd's,
        # which does not have the context of this one.
        ctx.communicator = current_communicator()
        gradient.save(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with running_on(ctx.communicator):
            return gradient.backward(ctx, *grads)

    definition.register_autograd(backward, setup_context=save)
