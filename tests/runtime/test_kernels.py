"""Kernels are made on all ranks or on none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sp_compiler.runtime.kernels import compile_kernels


class _Kernel:
    def __init__(self, name: str, fails: str = "", is_rare: bool = False) -> None:
        self.name, self.fails, self.is_rare = name, fails, is_rare
        self.compiled, self.written = 0, ""
        self.before_first_call: Callable[[], object] = self.compile

    def compile(self) -> str:
        self.compiled += 1
        return self.fails

    def run_as_written(self, reason: str) -> None:
        self.written = reason


class _Agreement:
    """Two ranks; this one is rank 1, and rank 0 fails where ``fails`` says so."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.met: list[str] = []

    def exchanged(self, purpose: str, text: str) -> list[str]:
        self.met.append(purpose)
        return ["no memory" if purpose == self.fails else "", text]


def _compiled(*kernels: _Kernel) -> Any:
    program = SimpleNamespace(regions=[SimpleNamespace(name="block"), SimpleNamespace(name="head")])
    notes = ["a"]
    return SimpleNamespace(
        program=program, kernels={"block": kernels}, notes=notes, add_notes=notes.extend
    )


def test_each_is_compiled_once_and_in_order() -> None:
    first, second = _Kernel("f_1"), _Kernel("f_2")
    compiled, agreement = _compiled(first, second), _Agreement()
    for _ in range(2):
        compile_kernels(agreement, compiled)  # type: ignore[arg-type]
    assert agreement.met == ["compiles f_1", "compiles f_2"]
    assert (first.compiled, second.compiled) == (1, 1)
    assert (first.written, second.written) == ("", "")
    assert compiled.notes == ["a"]


def test_what_fails_on_any_rank_runs_as_written_on_this_one() -> None:
    kernels = [_Kernel("f_1"), _Kernel("f_2", fails="killed"), _Kernel("f_3")]
    compiled = _compiled(*kernels)
    compile_kernels(_Agreement("compiles f_1"), compiled)  # type: ignore[arg-type]
    assert [kernel.written for kernel in kernels] == ["rank 0: no memory", "rank 1: killed", ""]
    assert compiled.notes == [
        "a",
        "f_1 runs uncompiled on all ranks: rank 0: no memory",
        "f_2 runs uncompiled on all ranks: rank 1: killed",
    ]


def test_those_of_other_stages_are_left_alone() -> None:
    other = _Kernel("f_1")
    compiled = _compiled()
    compiled.kernels = {"tail": [other]}
    compile_kernels(_Agreement(), compiled)  # type: ignore[arg-type]
    assert not other.compiled


def test_a_rare_one_is_compiled_on_all_ranks_when_it_is_called() -> None:
    rare = _Kernel("f_1", is_rare=True)
    compiled, agreement = _compiled(rare, _Kernel("f_2")), _Agreement("compiles f_1")
    compile_kernels(agreement, compiled)  # type: ignore[arg-type]
    assert (agreement.met, rare.compiled) == (["compiles f_2"], 0)
    rare.before_first_call()
    assert (agreement.met, rare.compiled) == (["compiles f_2", "compiles f_1"], 1)
    assert rare.written == "rank 0: no memory"
    assert compiled.notes == ["a", "f_1 runs uncompiled on all ranks: rank 0: no memory"]


@pytest.mark.usefixtures("nothing_frozen")
def test_the_garbage_collector_skips_older_objects_meanwhile() -> None:
    frozen = []

    class Counting(_Kernel):
        def compile(self) -> str:
            frozen.append(gc.get_freeze_count())
            return super().compile()

    compile_kernels(_Agreement(), _compiled(Counting("f_1")))  # type: ignore[arg-type]
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0
