"""The result of a verification, as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sp_compiler.base.pass_report import Pass, PassReport, report_lines

FLOOR = 1e-5
"""Of the largest gradient: smaller ones are zero in theory and hold rounding of the others."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of numbers.

    Attributes:
        stage: the pass whose result is compared, or "check" where placements were refused.
        subject: "model" for the whole step, else the name of a block run on random data.
        error: the worst relative error; infinite where there is nothing to compare.
        tolerance: what is allowed.
        where: the output or gradient with the worst error.
        message: why there is nothing to compare, "" otherwise.
    """

    stage: str
    subject: str
    error: float
    tolerance: float
    where: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """Whether a compiled model computes what the model does.

    Attributes:
        model_name: class of the model.
        tp: number of simulated ranks.
        table: every comparison, the whole step in the order of the passes, then single blocks.
        passes: what each pass did to the float64 copy.
    """

    model_name: str
    tp: int
    table: tuple[Comparison, ...]
    passes: tuple[PassReport, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every comparison is within its tolerance."""
        return all(row.ok for row in self.table)

    @property
    def worst(self) -> float:
        """The largest relative error of all comparisons."""
        return max((row.error for row in self.table), default=0.0)

    @property
    def first_bad_pass(self) -> str | None:
        """The first pass, in the order of the pipeline, whose numbers are wrong.

        "check" where a placement was refused although every number agrees.
        """
        order = list(dict.fromkeys(row.stage for row in self.table))
        bad = {row.stage for row in self.table if not row.ok}
        return min(bad, key=lambda stage: (stage == Pass.CHECK, order.index(stage)), default=None)

    def to_json(self) -> str:
        """The comparisons and the verdict as JSON; an infinite error is ``null``."""
        rows = [
            {**asdict(row), "ok": row.ok, "error": row.error if row.error < float("inf") else None}
            for row in self.table
        ]
        data = {
            "model_name": self.model_name,
            "tp": self.tp,
            "ok": self.ok,
            "worst": self.worst if self.worst < float("inf") else None,
            "first_bad_pass": self.first_bad_pass,
            "table": rows,
            "passes": [asdict(report) for report in self.passes],
        }
        return json.dumps(data, indent=2)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"WRONG since pass {self.first_bad_pass!r}"
        lines = [f"{self.model_name} on {self.tp} simulated ranks: {verdict}"]
        stages = max((len(row.stage) for row in self.table), default=0)
        subjects = max((len(row.subject) for row in self.table), default=0)
        for row in self.table:
            mark = "ok " if row.ok else "BAD"
            lines.append(
                f"  {mark} {row.stage:<{stages}}  {row.subject:<{subjects}}  "
                f"{row.error:8.1e} of {row.tolerance:.0e}  {row.where}".rstrip()
            )
            lines += [f"        {line}" for line in row.message.splitlines()]
        lines += ["Passes", *(f"  {line}" for line in report_lines(self.passes))]
        return "\n".join(lines)


def output_errors(found: Sequence[Any], true: Sequence[Any]) -> dict[str, float]:
    """Relative error of each output, by "output i"; what is no tensor must be equal."""
    errors = {}
    for index, (mine, theirs) in enumerate(zip(found, true, strict=True)):
        if not isinstance(theirs, Tensor):
            errors[f"output {index}"] = 0.0 if mine == theirs else float("inf")
            continue
        errors[f"output {index}"] = _difference(mine, theirs, _size(theirs) or 1.0)
    return errors


def gradient_errors(
    found: Mapping[str, Tensor | None], true: Mapping[str, Tensor | None]
) -> dict[str, float]:
    """max|g - g0| / max(max|g0|, FLOOR of the largest gradient) by name; no gradient is zero."""
    sizes = {name: 0.0 if g is None else _size(g) for name, g in true.items()}
    floor = FLOOR * max(sizes.values(), default=0.0) or 1.0
    errors = {}
    for name, theirs in true.items():
        mine = found.get(name)
        if theirs is None:
            errors[name] = 0.0 if mine is None else _size(mine) / floor
        elif mine is None:
            errors[name] = sizes[name] / max(sizes[name], floor)
        else:
            errors[name] = _difference(mine, theirs, max(sizes[name], floor))
    return errors


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _difference(mine: Tensor, theirs: Tensor, scale: float) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    difference = (mine.detach().double() - theirs.detach().double()).abs()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    difference = difference.masked_fill(same, 0.0)  # equal infinities differ by NaN
    worst = float(difference.max()) if difference.numel() else 0.0
    return worst / scale if worst == worst else float("inf")
