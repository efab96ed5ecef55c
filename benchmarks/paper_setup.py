"""Settings of the activation-recomputation paper's runs, and the times that it prints.

Source: Korthikanti et al., arXiv 2205.05198: table 2 (settings), tables 3 and 5 (runs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BASELINE = "tensor parallel"


@dataclass(frozen=True)
class Setting:
    """One row of table 2.

    Args:
        options: of :func:`sp_compiler.plan`.
        formula: the paper's bytes of a layer in units of sbh, of ``t`` and of ``as/h``; ``None``
            for what the paper does not have.
    """

    options: dict[str, Any]
    formula: Callable[[int, float], float] | None


def _setting(
    recompute: str, sp: bool, formula: Callable[[int, float], float] | None, dropout: str = "stored"
) -> Setting:
    options = {"recompute": recompute, "sequence_parallel": sp, "dropout": dropout}
    return Setting(options, formula)


SETTINGS = {
    BASELINE: _setting("none", False, lambda t, core: 10 + 24 / t + 5 * core / t),
    "tensor + sequence parallel": _setting("none", True, lambda t, core: (34 + 5 * core) / t),
    "tensor parallel + selective": _setting("attention", False, lambda t, core: 10 + 24 / t),
    "both": _setting("attention", True, lambda t, core: 34 / t),
    "full recompute": _setting("full", False, lambda t, core: 2),
    "sp_compiler": _setting("selective", True, None, "regenerate"),
}


@dataclass(frozen=True)
class Reported:
    """Row of tables 3 and 5 for one model.

    Attributes:
        seconds: of a step with sequence parallelism and selective recomputation.
        full_seconds: of a step with full recomputation.
        mfu: percent, as ``hfu`` of the faster step.
        chunks: of a pipeline stage.
    """

    seconds: float
    full_seconds: float
    mfu: float
    hfu: float
    chunks: int = 1


REPORTED = {
    "gpt-22b": Reported(1.10, 1.42, 41.5, 43.7),
    "gpt3-175b": Reported(13.75, 18.13, 51.4, 52.8, chunks=3),
    "mt-nlg-530b": Reported(37.83, 49.05, 56.0, 57.0, chunks=3),
    "gpt-1t": Reported(71.49, 94.42, 56.3, 57.0),
}
LAYER_MS = {
    # forward and backward of one layer of the 22B model (table 4)
    BASELINE: (7.7, 11.9),
    "tensor + sequence parallel": (7.2, 11.8),
    "full recompute": (7.7, 19.5),
    "tensor parallel + selective": (7.7, 13.2),
    "both": (7.2, 13.1),
}
Row = tuple[str, str, float, float]
"""Model, quantity, the paper's number, ours."""
