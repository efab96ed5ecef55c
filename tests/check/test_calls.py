"""The check of calls: a sharded program reads, writes and returns what the model does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler import compiler
from sp_compiler.base.errors import PlacementError
from sp_compiler.base.placement import I, P, S
from sp_compiler.check import check_calls
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Program, Ref
from sp_compiler.options import CompileOptions
from sp_compiler.passes.memory.tag_program import TaggedProgram


class _Model(nn.Module):
    """Two equal layers, whose results are returned, and a buffer that is written."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(2)
        )
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("latest", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.blocks[0](x) + x
        second = self.blocks[1](first) + first
        self.running = 0.9 * self.running + 0.1 * first.detach().mean((0, 1))
        self.latest = second.detach().mean((0, 1))
        return second.square().mean(), first, second


def _built() -> CompiledProgram:
    return build(_Model(), (torch.randn(2, 4, 8),), {}, CompileOptions(tp=2), keep="unsharded")


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return _built()


def _of_layers(program: Program) -> list[int]:
    """The indices of the calls of the repeated layer."""
    first, second = (i for i, call in enumerate(program.calls) if call.path.startswith("blocks"))
    return [first, second]


def _with_args(program: Program, index: int, change: Callable[[Ref], Ref]) -> Program:
    calls = list(program.calls)
    calls[index] = replace(calls[index], args=tuple(map(change, calls[index].args)))
    return replace(program, calls=calls)


def _a_weight_of_another_layer(program: Program) -> Program:
    return _with_args(
        program,
        _of_layers(program)[1],
        lambda ref: replace(ref, name=ref.name.replace("blocks.1.0", "blocks.0.0")),
    )


def _masks_of_another_layer(program: Program) -> Program:
    first, second = _of_layers(program)
    (seed,) = [ref for ref in program.calls[first].args if ref.kind == "seed"]
    return _with_args(program, second, lambda ref: seed if ref.kind == "seed" else ref)


def _another_output(program: Program) -> Program:
    loss, first, second = program.outputs
    return replace(program, outputs=[loss, second, first])


def _exchanged_buffers(program: Program) -> Program:
    (one, first), (other, second) = program.mutated_buffers.items()
    return replace(program, mutated_buffers={one: second, other: first})


def _a_buffer_left_out(program: Program) -> Program:
    return replace(program, mutated_buffers={"running": program.mutated_buffers["running"]})


def _placed_otherwise(program: Program) -> Program:
    """A layer that takes what the one before returns as if that were a partial sum."""
    index = _of_layers(program)[1]
    region = program.calls[index].region
    (position,) = [i for i, ref in enumerate(program.calls[index].args) if ref.kind == "call"]
    placements = list(region.input_placements)
    placements[position] = P if placements[position] != P else I
    other = replace(region, input_placements=tuple(placements))
    calls = [
        replace(call, region=other) if call.region is region else call for call in program.calls
    ]
    return replace(program, calls=calls)


_WRONG: dict[Callable[[Program], Program], str] = {
    _a_weight_of_another_layer: r"blocks.1\) reads param blocks.0.0.weight; expected param blocks"
    r".1.0.weight for its input '0.weight'",
    _masks_of_another_layer: r"blocks.1\) reads seed 0; expected seed [12]",
    _another_output: "outputs: 1 of the program is output",
    _exchanged_buffers: "buffers: running of the program is output",
    _a_buffer_left_out: "writes the buffers running; expected running, latest",
    _placed_otherwise: r"takes .* as P, which is [IRS]",
}


def _unsharded(compiled: CompiledProgram) -> Program:
    assert compiled.unsharded is not None
    return compiled.unsharded[1]


@pytest.mark.parametrize("change", _WRONG, ids=lambda each: each.__name__)
def test_wrong_calls_are_refused(
    compiled: CompiledProgram, change: Callable[[Program], Program]
) -> None:
    before, placements = _unsharded(compiled), compiled.param_placements
    # The right one passes, though it returns the first layer's result apart from the second's.
    assert check_calls(compiled.program, before, placements).checked
    with pytest.raises(PlacementError, match=re.compile(_WRONG[change])):
        check_calls(change(compiled.program), before, placements)


def test_a_parameter_that_is_stored_otherwise(compiled: CompiledProgram) -> None:
    name = "blocks.0.0.weight"
    other = {**compiled.param_placements, name: S(1)}
    assert compiled.param_placements[name] != S(1)
    with pytest.raises(PlacementError, match=rf"takes param {name} as S\(0\), which is S\(1\)"):
        check_calls(compiled.program, _unsharded(compiled), other)


def test_layers_that_would_drop_the_same_elements(compiled: CompiledProgram) -> None:
    """As the outline left them."""
    alike = _masks_of_another_layer(compiled.program)
    message = r"call \d \(.*, blocks.1\) draws the numbers of call \d again for its input 'seed'"
    with pytest.raises(PlacementError, match=message):
        check_calls(alike, alike, compiled.param_placements)


@pytest.mark.parametrize("name", ["shard", "tag_program"])
def test_a_pass_that_exchanges_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is right by itself."""
    original = getattr(compiler, name)

    def broken(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        program = _a_weight_of_another_layer(result.program)
        if isinstance(result, TaggedProgram):
            return TaggedProgram(program, result.joints, result.origins)
        return replace(result, program=program)

    broken.__name__ = name
    monkeypatch.setattr(compiler, name, broken)
    with pytest.raises(PlacementError, match=r"expected param blocks\.1\.0\.weight"):
        _built()
