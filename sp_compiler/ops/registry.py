"""The record of a custom operator: everything that the rest of the compiler needs to know about it.

Code that depends on the rank is a custom operator. A graph only names it, so neither a rank nor a
process group is baked into the graph. Generated code calls the kernel as a method of the
communicator, ``tp.<name>(...)``; an interpreted graph calls the same kernel through torch's
dispatcher, which gets the communicator from the context
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
"""Placements of the tensor operands and of the results. A result that is R is I if its operands
are; a result that is I is I whatever they are."""


@dataclass(frozen=True)
class Collective:
    """One kind of communication.

    Attributes:
        kind: "all_gather", "reduce_scatter" or "all_reduce" over "tp"; "all_to_all" over "ep".
        count: number of these collectives.
        num_bytes: bytes of the global tensors: the result of a gather, the operand of a scatter or
            a reduction. For an all-to-all, what one rank sends if all ranks get the same amount.
    """

    kind: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Gradient:
    """The two functions of :func:`torch.library.register_autograd`.

    Attributes:
        save: ``(ctx, inputs, output)``: saves in ``ctx`` what backward needs.
        backward: ``(ctx, *grads)``: returns a gradient, or ``None``, for every argument of the
            schema.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One of our operators, ``torch.ops.sp_compiler.<name>``.

    Attributes:
        name: name of the operator and of the communicator's method.
        schema: in torch's syntax. The last argument without a default is ``world_size``: tensors in
            a graph have the shapes of one rank, from which a fake kernel cannot derive the global
            ones.
        kernel: computes it from a communicator and the arguments of the schema, without
            ``world_size`` unless the kernel has a parameter of this name.
        fake: computes the result's shape and dtype from the arguments of the schema.
        typings: returns all placements that it may run with, from its arguments and the number of
            ranks; the checks rely on them. An empty result means that the arguments contradict each
            other.
        gradient: ``None`` if it is never differentiated.
        result_names: names of several results in generated code.
        view: whether the kernel returns "all" or a "part" of its first argument's storage.
        placed: whether the value of an element depends on its position in the global tensor. Then
            the operator takes ``dim``, the sharded one, and ``world_size``, and is elementwise
            otherwise.
        dims: the dims of operands and results, as letters: ``"vh,...->...h"``. Only memory formulas
            read it; without it, they have plain numbers for the dims of the result.
        collectives: the kernel's communication, from its arguments and its result; ``None`` for
            none. (Conversions have theirs in :data:`~sp_compiler.ops.convert.CONVERSIONS`.)
        checks_numbers: whether the kernel reads values on the host to reject wrong ones.
        compiled: whether the kernel is compiled separately.
        writes: whether the kernel writes into its first argument and returns it. No other node of a
            graph reads that argument afterwards.
        scratch_bytes: bytes of temporary memory of the kernel, from its arguments and its result.
        pipelined: whether the kernel computes with one rank's part while its collective moves those
            of other ranks.
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
    collectives: Callable[[Arguments, Any], Sequence[Collective]] | None = None
    checks_numbers: bool = False
    compiled: bool = False
    scratch_bytes: Callable[[Arguments, Any], int] = lambda args, result: 0
    writes: bool = False
    pipelined: bool = False

    @cached_property
    def overload(self) -> Any:
        """The operator overload, which is the target of its nodes."""
        return getattr(torch.ops.sp_compiler, self.name).default

    @property
    def runs_apart(self) -> bool:
        """Return whether no backend may compile the kernel as a part of a function."""
        return self.checks_numbers or self.compiled

    @cached_property
    def takes_world_size(self) -> bool:
        """Return whether calls pass the number of ranks; else it is the size of the group."""
        return "world_size" in inspect.signature(self.kernel).parameters

    def method_arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of the schema that the communicator's method takes."""
        return args if self.takes_world_size else args[:-1]

    def run(self, *args: Any) -> Any:
        """Run the kernel on the communicator of the context.

        Raises:
            UnsupportedError: no communicator in the context.
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

        # The schema promises autograd a new result. Generated code needs no such promise, and makes
        # do with the argument itself or a view.
        def own(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage()._cdata in given else x

        return tree_map_only(Tensor, own, result)


def bytes_of(x: Tensor) -> int:
    """Return the bytes of the elements of ``x``, for collectives and scratch memory."""
    return x.numel() * x.element_size()


OPERATORS: dict[str, Operator] = {}
"""All our operators by name."""


def operator_of(target: object) -> Operator | None:
    """Return the record of a node's ``target``; ``None`` if it is not one of our operators."""
    if getattr(target, "namespace", "") != "sp_compiler":
        return None
    return OPERATORS[target.__name__.partition(".")[0]]  # type: ignore[attr-defined]


def register(operator: Operator) -> Operator:
    """Register ``operator`` with torch, the communicator and the compiler."""
    OPERATORS[operator.name] = operator
    # The generated code calls tp.<name>: a method call, which bypasses torch's dispatcher.
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
        # Backward may run after the context has been left, and on a GPU in a thread of autograd,
        # which does not have this context.
        ctx.communicator = current_communicator()
        gradient.save(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with running_on(ctx.communicator):
            return gradient.backward(ctx, *grads)

    definition.register_autograd(backward, setup_context=save)
