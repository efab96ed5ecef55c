"""Sharding rules that users write for their own operators, as text.

``"...i, oi -> ...o"``: one letter per dim, the operands in the order of the operator's tensor
arguments, then the results; ``...`` stands for any number of leading dims, the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError
from sp_compiler.rules.factors import Dims, Factor, OpRule
from sp_compiler.rules.registry import ROWS, Row

UNPROVEN: set[str] = set()
"""Operators whose rule is a user's and has not been verified numerically yet."""

_TENSOR = re.compile(r"^(\.\.\.)?([A-Za-z]*)$")


def rule(
    op: Any,
    text: str,
    *,
    whole: str = "",
    linear: str | Sequence[str | Sequence[str]] = (),
) -> None:
    """Register how your own operator may be sharded over ranks.

    >>> sp_compiler.rule("mylib::gated_norm", "...h, ...h, h -> ...h", whole="h")
    >>> sp_compiler.rule("mylib::low_rank", "...i, ri, or -> ...o", linear=["x"])

    Each letter is a dim of the operator, as in ``einsum``. Sharding the operator by a letter means:
    every operand and result with that letter is sharded along it, one part per rank, and the
    operator runs on the parts. Operands without the letter are replicated. A result without it is a
    partial sum: as in ``einsum``, **a letter that a result lacks is summed over**. This must be
    right for every letter that is not in ``whole``, and for the dims that ``...`` stands for. The
    compiler shards by one of them, or by none.

    The rule is verified numerically: the first compilation that uses it compares the blocks that
    have the operator with unsharded ones, on random data on simulated ranks. Register a rule before
    compiling, and the same one on every rank; a second rule for an operator replaces the first. If
    the backward is another custom operator, it needs a rule too; a backward made of PyTorch's
    operators does not.

    Args:
        op: ``"namespace::name"``, or the operator itself: the result of
            ``torch.library.custom_op``, or an entry of ``torch.ops``. It must return tensors,
            mutate none, and have a fake implementation. The rule is for all its overloads.
        text: dims of every tensor argument, then of every result: a comma between tensors, one
            letter per dim, no letters for a 0-dim tensor; blanks have no meaning. An optional
            tensor has its place even if it is not passed. A dim of size 1 fits any letter and is
            not sharded. Write the tokens (batch, sequence) as ``...`` if the operator takes any
            number of leading dims: only then can they be flattened to rows for sequence
            parallelism.
        whole: letters that are never sharded: dims that the operator mixes (the width of a norm,
            the keys of attention), or whose size is also passed in another argument.
        linear: names of tensor arguments in which the operator is linear when the others are fixed,
            so that partial sums pass through it. A tuple names arguments in which it is jointly
            linear, as addition is. For a backward: its incoming gradient.

    Raises:
        ArgumentError: ``op`` is not such an operator or has a built-in rule; ``text``, ``whole`` or
            ``linear`` do not fit its arguments. At compilation: a tensor has another number of dims
            than in ``text``, or dims with one letter have different sizes.
    """
    schema = _schema(op)
    _check_texts(text, whole, linear)
    signature = _Signature.parse(schema, text, whole, linear)
    # A user's rule may be corrected in a notebook; other passes rely on the built-in ones.
    if _is_built_in(schema):
        raise ArgumentError(
            f"op={schema.name!r} already has a built-in sharding rule, which cannot be replaced; "
            "drop this call, or move the part to be sharded differently into a custom operator "
            "(torch.library.custom_op)"
        )
    ROWS[schema.name] = Row(signature.rule_for)
    UNPROVEN.add(schema.name)


def user_rule(op: str) -> tuple[tuple[str, str], dict[str, Any]] | None:
    """Return the arguments of the call of :func:`rule` for the operator of this name, if there was
    one."""
    signature = getattr(getattr(ROWS.get(op), "factors", None), "__self__", None)
    if not isinstance(signature, _Signature):
        return None
    options = {"whole": "".join(sorted(signature.whole)), "linear": signature.linear}
    return (op, signature.text), options


def _check_texts(text: Any, whole: Any, linear: Any) -> None:
    for name, value, example in (("text", text, "...h, h -> ...h"), ("whole", whole, "h")):
        if not isinstance(value, str):
            raise ArgumentError(f"{name}={value!r}: expected a str such as {example!r}")
    # A str is a sequence of strs.
    are_lists = isinstance(linear, Sequence) and all(isinstance(x, Sequence) for x in linear)
    if not are_lists or not all(isinstance(name, str) for x in linear for name in x):
        raise ArgumentError(
            f"linear={linear!r}: expected the name of an argument, or a list of names "
            "and tuples of names"
        )


def _is_built_in(schema: torch.FunctionSchema) -> bool:
    """Return whether the operator has a rule that is not a user's."""
    row = ROWS.get(schema.name)
    if row is not None:
        return not isinstance(getattr(row.factors, "__self__", None), _Signature)
    # One row covers all pointwise operators of PyTorch. A custom operator may have the tag and a
    # rule of its own.
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    tags = getattr(packet, schema.overload_name or "default").tags
    return namespace == "aten" and torch.Tag.pointwise in tags


def _schema(op: Any) -> torch.FunctionSchema:
    """Return the schema of an operator that may run on parts."""
    target = getattr(op, "_opoverload", op)  # of what custom_op returns
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
    else:
        schema = _find(getattr(target, "_qualified_op_name", target), op)._schema
    kinds = [str(argument.type) for argument in (*schema.arguments, *schema.returns)]
    # The tensors of a list have no letters, and a mutation would change only one rank's part.
    if schema.is_mutable or any("List[" in kind and "Tensor" in kind for kind in kinds):
        raise ArgumentError(
            f"op={schema.name!r} mutates an argument, or takes or returns a list of tensors; a "
            "rule needs an operator that takes each tensor as a separate argument and returns "
            "new tensors"
        )
    return schema


def _find(name: Any, op: Any) -> torch._ops.OpOverload:
    """Return the first overload of "namespace::name"."""
    match = re.fullmatch(r"(\w+)::(\w+)", name) if isinstance(name, str) else None
    packet = getattr(getattr(torch.ops, match[1]), match[2], None) if match else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise ArgumentError(
            f"op={op!r} is not a registered operator; expected 'namespace::name' or what "
            "torch.library.custom_op returns, after the module that defines it is imported"
        )
    return getattr(packet, packet.overloads()[0])


@dataclass(frozen=True)
class _Tensor:
    """Letters of the dims of one tensor, optionally after any number of leading dims."""

    name: str
    letters: str
    has_more: bool

    def __str__(self) -> str:
        return f"{'...' if self.has_more else ''}{self.letters}"


@dataclass(frozen=True)
class _Signature:
    """A parsed text.

    Attributes:
        operands: letters by the name of the argument.
        linear: sets of names of arguments.
    """

    op: str
    text: str
    operands: dict[str, _Tensor]
    results: tuple[_Tensor, ...]
    whole: frozenset[str]
    linear: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(
        cls,
        schema: torch.FunctionSchema,
        text: str,
        whole: str,
        linear: str | Sequence[str | Sequence[str]],
    ) -> _Signature:
        left, arrow, right = text.replace(" ", "").partition("->")
        if not arrow or "->" in right:
            raise ArgumentError(f"text={text!r} needs one '->' between operands and results")
        names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
        operands = _tensors(text, left, names, "tensor arguments", schema.name)
        of_results = [f"result {index}" for index in range(len(schema.returns))]
        results = _tensors(text, right, of_results, "results", schema.name)
        used = {letter for tensor in operands for letter in tensor.letters}
        unknown = {letter for tensor in results for letter in tensor.letters} - used
        if unknown or (any(t.has_more for t in results) and not any(t.has_more for t in operands)):
            what = ", ".join(sorted(unknown)) or "..."
            raise ArgumentError(f"text={text!r}: no operand has {what}, which a result has")
        if not set(whole.replace(" ", "")) <= used:
            raise ArgumentError(f"whole={whole!r} names letters that text={text!r} does not have")
        sets = [linear] if isinstance(linear, str) else list(linear)
        named = tuple((item,) if isinstance(item, str) else tuple(item) for item in sets)
        if not {name for item in named for name in item} <= set(names):
            raise ArgumentError(
                f"linear={linear!r} names no tensor argument of {schema.name}; it has "
                + ", ".join(names)
            )
        by_name = {tensor.name: tensor for tensor in operands}
        return cls(schema.name, text, by_name, results, frozenset(whole) - {" "}, named)

    def rule_for(self, node: Node) -> OpRule:
        """Return the factors of one call."""
        names = [argument.name for argument in node.target._schema.arguments]
        given = [*zip(names, node.args, strict=False), *node.kwargs.items()]
        sources = {name: value for name, value in given if isinstance(value, Node)}
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else [value]
        factors: dict[str, Factor] = {}
        operands = tuple(
            self._dims(self.operands[name], source.meta["val"].shape, factors)
            for name, source in sources.items()
        )
        results = tuple(
            self._dims(tensor, item.shape, factors, is_result=True)
            for tensor, item in zip(self.results, values, strict=True)
        )
        # Optional tensors that are not passed have no position; a set that names one is dropped.
        positions = {name: index for index, name in enumerate(sources)}
        linear = tuple(
            tuple(positions[name] for name in names)
            for names in self.linear
            if all(name in positions for name in names)
        )
        # A letter that only some of the results lack makes those partial and shards the others.
        of_results = [{factor for dim in dims for factor in dim} for dims in results]
        summed = [f for f in factors.values() if any(f not in result for result in of_results)]
        # Only an operator for any number of leading dims can run on them flattened to one.
        flattens = all(tensor.has_more for tensor in self.results)
        return OpRule(
            operands,
            results,
            contracted=tuple(summed),
            linear=linear,
            rows="leading" if flattens else "fixed",
        )

    def _dims(
        self,
        tensor: _Tensor,
        shape: Sequence[int],
        factors: dict[str, Factor],
        is_result: bool = False,
    ) -> Dims:
        """Return the dims of a tensor of ``shape``; new factors are added to ``factors``.

        Operands may be broadcast along a dim of size 1.
        """
        more = len(shape) - len(tensor.letters)
        if more < 0 or (more and not tensor.has_more):
            self._refuse(f"{tensor.name} is {tensor!s}, but has shape {tuple(shape)}")
        # Leading dims are counted from the right, as broadcasting does.
        names = [f".{position}" for position in range(more, 0, -1)] + list(tensor.letters)
        dims = []
        for name, size in zip(names, shape, strict=True):
            known = factors.get(name, Factor(name, size, name in self.whole))
            if known.size != size and (is_result or size != 1):
                what = f"{name!r} has" if name.isalpha() else "a dim before the letters has"
                self._refuse(f"{what} size {known.size}, but {size} in {tensor.name}")
            # A dim of size 1 gets a factor only to mark that it must not become part of the rows.
            if size != 1 or known.blocked:
                factors[name] = known
            dims.append((known,) if size == known.size and name in factors else ())
        return tuple(dims)

    def _refuse(self, what: str) -> None:
        raise ArgumentError(f"the rule of op={self.op!r}, text={self.text!r}, is wrong: {what}")


def _tensors(text: str, part: str, names: Sequence[str], what: str, op: str) -> tuple[_Tensor, ...]:
    items = part.split(",")
    if len(items) != len(names):
        raise ArgumentError(
            f"text={text!r} has {len(items)} {what}, but {op} has {len(names)}: {', '.join(names)}"
        )
    tensors = []
    for name, item in zip(names, items, strict=True):
        match = _TENSOR.match(item)
        if match is None or len(set(match[2])) < len(match[2]):
            raise ArgumentError(
                f"text={text!r}: {item!r} for {name} is not letters, each once, perhaps after '...'"
            )
        tensors.append(_Tensor(name, match[2], match[1] is not None))
    return tuple(tensors)
