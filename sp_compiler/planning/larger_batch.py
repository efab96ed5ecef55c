"""Formulas at a batch of one, which looks like any other size of 1: derived at a larger batch.

A tensor of shape (1, 1, s, d) has two dims of size 1. A graph for a batch of one may not show which
of them is the batch and which is the one head that each rank has: both sizes are 1, and operators
accept either. In a graph for a batch of two the same dims have different sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.log import LOG
from sp_compiler.planning.data import KeptTensor
from sp_compiler.planning.formula import ActivationFormula
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram

CompileAt = Callable[..., PlannedProgram]


def with_batch_formulas(
    compiled: PlannedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    compile_at: CompileAt,
) -> Plan:
    """Return the plan of ``compiled``, with formulas in which the batch differs from other sizes.

    If the batch is 1 and the plan's own formulas cannot tell it from other sizes of 1, the same
    model is compiled again for more sequences when the formulas are first read. The new formulas
    replace the plan's own if at a batch of one they give the same bytes, tensor by tensor.
    Otherwise the plan keeps its own formulas, which reject other sizes.

    Args:
        compiled: for ``args`` and ``kwargs``.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        compile_at: :func:`sp_compiler.compiler.build` with the model and its options.
    """
    plan = compiled.plan
    if all(_first_one(leaf) is None for leaf in pytree.tree_leaves((args, kwargs))):
        return plan
    at = partial(compile_at, fixed=compiled.param_placements, keep="nothing")
    return replace(plan, formula_maker=_FormulaMaker(plan, args, kwargs, at))


class _FormulaMaker:
    """Derives the formulas once; until then it holds the model, by way of ``compile_at``."""

    def __init__(
        self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], compile_at: CompileAt
    ) -> None:
        self._derive: Callable[[], ActivationFormula] | None
        self._derive = partial(_derived, plan, args, kwargs, compile_at)
        self._formula: ActivationFormula | None = None

    def __call__(self) -> ActivationFormula:
        if self._derive is not None:
            self._formula = self._derive()
            self._derive = None  # a model with weights may be large
        assert self._formula is not None
        return self._formula


def _derived(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], compile_at: CompileAt
) -> ActivationFormula:
    formula = plan.activation_formula
    if formula.tells_batch:
        return formula
    # The tokens of 1 + t sequences are divisible by t if those of one are, and padded otherwise.
    # Two sequences take less time to compile, and usually suffice.
    for batch in dict.fromkeys((2, 1 + plan.tp)):
        larger = partial(_repeated, count=batch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they were shown for the first batch
                other = compile_at(*pytree.tree_map(larger, (args, kwargs))).plan
        except Exception as error:  # the model's own code may raise anything for another batch
            LOG.info("no formulas from a batch of %d: %s", batch, error)
            continue
        derived = other.activation_formula.at_batch_of_one(batch)
        if derived is not None:
            derived = _in_order(derived, other, plan)
            if derived.same_bytes(formula):
                return derived
    return formula


def _in_order(derived: ActivationFormula, other: Plan, plan: Plan) -> ActivationFormula:
    """Return ``derived``, made from ``other``, with tensors in the order of ``plan`` if possible.

    For one sequence some copies are views, so that saved tensors may come in another order, or
    under the names of the values that they view. If they are different tensors, the comparison of
    their bytes shows it.
    """
    tensors = dict(derived.tensors)
    kept = {block.name: block.kept for block in plan.blocks}
    for block in other.blocks:
        given = dict(zip((tensor.name for tensor in block.kept), tensors[block.name], strict=True))
        ordered = _matched(given, kept.get(block.name, ()), derived)
        if len(ordered) == len(given):
            tensors[block.name] = ordered
    return replace(derived, tensors=tensors)


def _matched(
    given: Mapping[str, sympy.Expr], kept: Sequence[KeptTensor], derived: ActivationFormula
) -> tuple[sympy.Expr, ...]:
    """Return the formulas of ``kept`` tensors, by name or by bytes, up to one that is not known."""
    names = {tensor.name for tensor in kept}
    renamed = {name: formula for name, formula in given.items() if name not in names}
    result = []
    for tensor in kept:
        formula = given.get(tensor.name)
        if formula is None:
            fits = [
                name for name, each in renamed.items() if derived.value(each) == tensor.num_bytes
            ]
            # Two formulas give the same bytes at a batch of one: either may be this tensor's.
            if len({renamed[name] for name in fits}) != 1:
                break
            formula = renamed.pop(fits[0])
        result.append(formula)
    return tuple(result)


def _first_one(leaf: Any) -> int | None:
    """The first dim of size 1: the batch, unless the model puts another dim of size 1 before it."""
    return list(leaf.shape).index(1) if isinstance(leaf, Tensor) and 1 in leaf.shape else None


def _repeated(leaf: Any, count: int) -> Any:
    dim = _first_one(leaf)
    if dim is None:
        return leaf
    # The same values: properties of masks are proven for those of the example.
    return torch.cat([leaf.detach()] * count, dim).requires_grad_(leaf.requires_grad)
