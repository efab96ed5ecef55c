"""Options of :func:`sp_compiler.compile`, validated once."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.units import parse_bytes
from sp_compiler.ir.hints import Hint, checked_hints, hint_text

_POLICIES = Path(__file__).parent / "passes" / "memory" / "policies"
# By their files' names, for options are known to every pass and so may import none.
_NAMES = [module.name for module in pkgutil.iter_modules([str(_POLICIES)])]
RECOMPUTE = (*sorted(_NAMES, key=lambda name: (name != "none", name)), "auto")
"""Values of ``recompute``: the name of a policy's file, or "auto", under a memory budget."""
Dropout = Literal["regenerate", "stored"]
Backend = Literal["eager", "inductor"]
Outputs = Literal["replicate", "shard", "auto"]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What :func:`sp_compiler.compile` may be told; the README has what each field means.

    Raises:
        ArgumentError: a value outside what the field allows.
        UnsupportedError: a value that a later version will have.
    """

    tp: int = 1
    sequence_parallel: bool = True
    recompute: str = "selective"
    memory_budget: int | str | None = None
    dropout: Dropout = "regenerate"
    overlap: bool = True
    backend: Backend = "eager"
    outputs: Outputs = "auto"
    nominal_tokens: int = 8192
    hints: Mapping[str, Hint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_choice("dropout", self.dropout, get_args(Dropout))
        _check_choice("backend", self.backend, get_args(Backend))
        _check_choice("outputs", self.outputs, get_args(Outputs))
        for name in ("sequence_parallel", "overlap"):
            _check_choice(name, getattr(self, name), (True, False))
        for name in ("tp", "nominal_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r}: expected a positive int")
        object.__setattr__(self, "hints", checked_hints(self.hints))
        if (self.recompute == "auto") != (self.memory_budget is not None):
            raise ArgumentError(
                f"recompute={self.recompute!r} with memory_budget={self.memory_budget!r}: "
                'recompute="auto" needs a memory_budget such as "12GiB", and only it has one'
            )
        if self.memory_budget is not None:
            parse_bytes("memory_budget", self.memory_budget)
        if self.backend == "inductor":
            raise UnsupportedError('backend="inductor" is not in this version; use backend="eager"')

    def to_dict(self) -> dict[str, Any]:
        """Plain data; hints as a user writes them."""
        hints = {key: hint_text(hint) for key, hint in self.hints.items()}
        return {**asdict(replace(self, hints={})), "hints": hints}

    def texts(self) -> dict[str, str]:
        """Option name to the text of its value, the same for equal values on every rank."""
        options = self.to_dict()
        options["hints"] = dict(sorted(options["hints"].items()))
        return {name: repr(value) for name, value in options.items()}

    @property
    def budget_bytes(self) -> int | None:
        """``memory_budget`` as a number."""
        if self.memory_budget is None:
            return None
        return parse_bytes("memory_budget", self.memory_budget)


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed or type(value) not in {type(choice) for choice in allowed}:
        raise ArgumentError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
