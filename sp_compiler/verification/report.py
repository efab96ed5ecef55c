"""The result of a verification, as data and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor

from sp_compiler.base.pass_report import Pass, PassReport, report_lines
from sp_compiler.planning.html import framed

FLOOR = 1e-5
"""Relative to the largest gradient: smaller ones are zero in theory, with only rounding errors."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of results.

    Attributes:
        stage: the pass whose result is compared, or "check" if placements were rejected.
        subject: "model" for the full step, else the name of a block run on random data.
        error: the largest relative error; infinite if there are no results to compare.
        tolerance: the largest allowed error.
        where: the output or gradient with the largest error.
        message: the reason if there are no results to compare, else "".
        noise: the noise floor: the largest relative change of the unsharded result with another
            order of rounding, in the precision of the comparison.
        rounding: the largest relative difference between the unsharded result in that precision and
            in the model's own dtypes.
        operator: the first wrong operator of a sharded block, with its module and line in the
            user's model; "" if none is wrong or it is unknown.
    """

    stage: str
    subject: str
    error: float
    tolerance: float
    where: str = ""
    message: str = ""
    noise: float = 0.0
    rounding: float = 0.0
    operator: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """Result of :func:`sp_compiler.verify`; ``print`` shows every comparison.

    Attributes:
        model_name: class of the model.
        tp: number of simulated ranks.
        table: all comparisons: the full step after each pass, in order, then single blocks.
        passes: the report of each pass.
        precision: the dtype in which both sides were computed.
    """

    model_name: str
    tp: int
    table: tuple[Comparison, ...]
    passes: tuple[PassReport, ...] = ()
    precision: str = "float64"

    @property
    def ok(self) -> bool:
        """Return whether every comparison is within its tolerance."""
        return all(row.ok for row in self.table)

    @property
    def worst(self) -> float:
        """The largest relative error of all comparisons."""
        return max((row.error for row in self.table), default=0.0)

    @property
    def first_bad_pass(self) -> str | None:
        """The first pass whose result is wrong; ``None`` if all are right.

        "check" if a placement was rejected although all results agree.
        """
        order = list(dict.fromkeys(row.stage for row in self.table))
        bad = {row.stage for row in self.table if not row.ok}
        # The check comes last: a wrong result is more informative than a rejected placement.
        return min(bad, key=lambda stage: (stage == Pass.CHECK, order.index(stage)), default=None)

    @property
    def first_bad_operator(self) -> str | None:
        """The first operator of a sharded block with a wrong value or gradient, such as "linear of
        blocks.0.up, model.py:12 x = self.up(x)"; ``None`` if no sharding rule is to blame."""
        named = (row.operator for row in self.table if row.operator)
        return next(named, None) if self.first_bad_pass == Pass.SHARD else None

    def to_json(self) -> str:
        """The comparisons and the verdict as JSON; an infinite error is ``null``."""
        rows = [
            # JSON has no infinity.
            {**asdict(row), "ok": row.ok, "error": row.error if row.error < float("inf") else None}
            for row in self.table
        ]
        data = {
            "model_name": self.model_name,
            "tp": self.tp,
            "precision": self.precision,
            "ok": self.ok,
            "worst": self.worst if self.worst < float("inf") else None,
            "first_bad_pass": self.first_bad_pass,
            "first_bad_operator": self.first_bad_operator,
            "table": rows,
            "passes": [asdict(report) for report in self.passes],
        }
        return json.dumps(data, indent=2)

    def to_html(self, path: str | Path) -> None:
        """Write an HTML page with every comparison and the report of each pass; it works
        offline."""
        Path(path).write_text(self._page, encoding="utf-8")

    def _repr_html_(self) -> str:
        """Show the page of :meth:`to_html` in a notebook."""
        return framed(self._page)

    @property
    def _page(self) -> str:
        # Escaped: messages and lines of the model are text from outside.
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        source = files("sp_compiler.verification").joinpath("verify_page.html")
        return environment.from_string(source.read_text(encoding="utf-8")).render(
            title=self._title, rows=self.table, passes=list(report_lines(self.passes))
        )

    @property
    def _title(self) -> str:
        verdict = "ok" if self.ok else f"WRONG since pass {self.first_bad_pass!r}"
        return f"{self.model_name} on {self.tp} simulated ranks, in {self.precision}: {verdict}"

    def __str__(self) -> str:
        columns = "error, what is allowed, noise floor, rounding of the model's own dtypes"
        lines = [f"{self._title}; {columns}"]
        stages = max((len(row.stage) for row in self.table), default=0)
        subjects = max((len(row.subject) for row in self.table), default=0)
        for row in self.table:
            mark = "ok " if row.ok else "BAD"
            lines.append(
                f"  {mark} {row.stage:<{stages}}  {row.subject:<{subjects}}  "
                f"{row.error:8.1e} of {row.tolerance:.0e}  "
                f"{row.noise:7.0e}  {row.rounding:7.0e}  {row.where}".rstrip()
            )
            lines += [f"        {line}" for line in row.message.splitlines()]
            lines += [f"        wrong from here on: {row.operator}"] if row.operator else []
        # A search for the wrong pass starts with how much each has rewritten.
        lines += ["Passes", *(f"  {line}" for line in report_lines(self.passes))]
        return "\n".join(lines)


def output_errors(actual: Sequence[Any], expected: Sequence[Any]) -> dict[str, float]:
    """Return the relative error of each output, by "output i"; values that are not tensors must be
    equal."""
    errors = {}
    for index, (value, true) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(true, Tensor):
            errors[f"output {index}"] = 0.0 if value == true else float("inf")
            continue
        # Relative to the largest element, since an element that cancels to zero has no relative
        # error.
        errors[f"output {index}"] = _difference(value, true, _size(true) or 1.0)
    return errors


def gradient_errors(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """Return max|g - g0| / max(max|g0|, FLOOR of the largest gradient) by name; a missing gradient
    counts as zero."""
    sizes = {name: 0.0 if g is None else _size(g) for name, g in expected.items()}
    floor = FLOOR * max(sizes.values(), default=0.0) or 1.0
    errors = {}
    for name, true in expected.items():
        value = actual.get(name)
        if true is None:
            # If the model has no gradient, ours may be zeros: an optimizer would do the same.
            errors[name] = 0.0 if value is None else _size(value) / floor
        elif value is None:
            errors[name] = sizes[name] / max(sizes[name], floor)
        else:
            errors[name] = _difference(value, true, max(sizes[name], floor))
    return errors


def _size(tensor: Tensor) -> float:
    worst = _largest(tensor)
    if math.isfinite(worst):
        return worst
    # Of finite elements: compared with an infinite one, every error would look small.
    return _largest(tensor[tensor.isfinite()])


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; NaN if there is one, 0 if there are no elements."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex() or not tensor.is_floating_point():
        tensor = _wide(tensor).abs()
    # One pass without a copy: a comparison of weights costs as much as a matmul with them.
    low, high = torch.aminmax(tensor.detach())
    return max(float(high), -float(low)) if low == low else math.nan


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in a dtype of exact differences; complex numbers keep both parts."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


_PIECE = 1 << 16
"""Number of elements to compare at a time."""


def _difference(value: Tensor | None, true: Tensor, scale: float) -> float:
    if value is None or value.shape != true.shape:
        return float("inf")
    if value.data_ptr() == true.data_ptr() and value.stride() == true.stride():
        return 0.0  # computed once for both sides
    # A few rows at a time, which stay in the cache: the difference of entire tables takes longer
    # than a matmul with them.
    rows = max(1, _PIECE // max(1, value.shape[1:].numel()))
    pairs = zip(*(torch.atleast_1d(side).split(rows) for side in (value, true)), strict=True)
    return max(starmap(_largest_difference, pairs)) / scale


def _largest_difference(value: Tensor, true: Tensor) -> float:
    difference = _wide(value) - _wide(true)
    worst = _largest(difference)
    if not math.isfinite(worst):
        same = (value == true) | (value.isnan() & true.isnan())
        worst = _largest(difference.masked_fill_(same, 0.0))  # equal infinities differ by NaN
    return worst if worst == worst else math.inf
