"""Distinguish bugs from rounding: compare two results with the effect of rounding on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from sp_compiler.base.errors import SPCompilerError
from sp_compiler.ir.program import loss_position
from sp_compiler.verification.precision import OtherRounding, in_float64, widest
from sp_compiler.verification.report import Comparison, gradient_errors, output_errors

TOLERANCE = 1e-10
"""In float64, where the noise floor of a step is about 1e-15."""
# Sharding changes the order of all sums of a step at once; a noise floor tries one other order.
_TIMES_NOISE = 8.0


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a graph runs.

    Attributes:
        name: its name in reports.
        dtype: maps a dtype of the graph to the one used instead.
        entered: returns a context for the computation.
    """

    name: str
    dtype: Callable[[torch.dtype], torch.dtype]
    entered: Callable[[], AbstractContextManager[None]]

    def leaf(self, value: Any) -> Any:
        """Return a copy of ``value`` as a leaf with its own gradient."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach().to(self.dtype(value.dtype), copy=True)
        return copy.requires_grad_(value.requires_grad)


FLOAT64 = Precision("float64", widest, in_float64)
OWN = Precision("its own dtypes", lambda dtype: dtype, contextlib.nullcontext)


@dataclass(frozen=True)
class Numbers:
    """Results of a forward and a backward: outputs in order, gradients and new values of buffers by
    name."""

    outputs: Sequence[Any]
    grads: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_defined(self) -> bool:
        """Return whether no value is NaN: NaN on both sides of a comparison proves nothing."""
        tensors = [*self.outputs, *self.grads.values(), *self.buffers.values()]
        return not any(_has_nan(t) for t in tensors if isinstance(t, Tensor))

    def errors(self, true: Numbers) -> dict[str, float]:
        """Return relative errors by output, gradient and buffer."""
        of_grads = gradient_errors(self.grads, true.grads)
        named = {f"gradient of {name}": error for name, error in of_grads.items()}
        named |= {
            f"new value of {name}": output_errors([self.buffers.get(name)], [value])["output 0"]
            for name, value in true.buffers.items()
        }
        return output_errors(self.outputs, true.outputs) | named

    def worst(self, true: Numbers) -> float:
        return max(self.errors(true).values(), default=0.0)


@dataclass(frozen=True)
class Reference:
    """The results of an unsharded graph, and the effect of rounding on them.

    Attributes:
        precision: precision of both sides.
        true: results of the unsharded graph.
        noise: largest relative change with another order of rounding.
        rounding: largest relative difference between ``precision`` and the graph's own dtypes.
    """

    precision: Precision
    true: Numbers
    noise: float
    rounding: float

    @classmethod
    def of(cls, run: Callable[[Precision], Numbers], *, floors: bool = True) -> Reference:
        """Run a graph in float64, or in its own dtypes if an operator does not support float64.

        Args:
            run: computes the results in a precision, with the same inputs and seeds every time.
            floors: whether to measure noise and rounding, in two more runs; else they are 0.
        """
        try:
            precision, true = FLOAT64, run(FLOAT64)
        # Lower precision is judged by its own noise floor, so it cannot hide a bug.
        except Exception:  # a user's operator may raise anything; other errors are raised again
            precision, true = OWN, run(OWN)

        if not floors:
            return cls(precision, true, 0.0, 0.0)

        @contextlib.contextmanager
        def otherwise() -> Iterator[None]:
            with precision.entered(), OtherRounding():
                yield

        # The first run is the reference of both: exact results, which are unknown, are not needed
        # to measure the effect of rounding.
        moved = run(Precision(precision.name, precision.dtype, otherwise))
        return cls(precision, true, moved.worst(true), run(OWN).worst(true))

    @property
    def tolerance(self) -> float:
        """Relative error above which a difference is not rounding."""
        return max(TOLERANCE, _TIMES_NOISE * self.noise)

    def compare(self, stage: str, subject: str, numbers: Numbers) -> Comparison:
        """Compare the results of ``stage`` for the same graph."""
        errors = numbers.errors(self.true)
        # A row names one value: the worst, at which to look first.
        where = max(errors, key=errors.__getitem__, default="")
        return self._comparison(stage, subject, errors.get(where, 0.0), where=where)

    def failed(self, stage: str, subject: str, error: Exception) -> Comparison:
        """Record that ``stage`` has no results to compare."""
        own = isinstance(error, (SPCompilerError, RuntimeError))
        text = str(error) if own else f"{type(error).__name__}: {error}"
        return self._comparison(stage, subject, float("inf"), message=text)

    def _comparison(self, stage: str, subject: str, error: float, **texts: str) -> Comparison:
        return Comparison(
            stage, subject, error, self.tolerance, noise=self.noise, rounding=self.rounding, **texts
        )


def _has_nan(tensor: Tensor) -> bool:
    # A sum makes no copy. Only a finite one is conclusive, since it may be NaN or infinite for
    # other reasons too.
    return not bool(tensor.sum().isfinite()) and bool(tensor.isnan().any())


def unit_tangent(output: Tensor) -> Tensor:
    """Return ones; for a complex output also in the imaginary part, to detect errors there."""
    return torch.full_like(output, 1 + 1j if output.is_complex() else 1)


def roots_of(outputs: Sequence[Any], out_spec: TreeSpec) -> list[int]:
    """Return the positions of the outputs from which a step runs its backward: that of the loss
    (see :func:`~sp_compiler.ir.program.loss_position`), or of all outputs with a gradient."""
    values = enumerate(outputs)
    roots = {i: each for i, each in values if isinstance(each, Tensor) and each.requires_grad}
    loss = loss_position(out_spec, [i for i, each in roots.items() if each.dim() == 0])
    return list(roots) if loss is None else [loss]


def backward(outputs: Sequence[Any], out_spec: TreeSpec) -> None:
    """Run backward from :func:`roots_of` a model's outputs, with ones, as on simulated ranks."""
    roots = [outputs[position] for position in roots_of(outputs, out_spec)]
    if roots:
        torch.autograd.backward(roots, list(map(unit_tangent, roots)))
