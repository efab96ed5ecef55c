"""The calls of a step at the end of the generated code are those that run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.python_text import identifier
from sp_compiler.compiler import build
from sp_compiler.ir.program import Ref
from sp_compiler.options import CompileOptions
from sp_compiler.planning.planned_program import PlannedProgram
from tests.models import zoo


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


class _Skipping(nn.Module):
    """The first layer's result is read again behind the last layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(_Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.layers[0](self.stem(x))
        for layer in self.layers[1:]:
            x = layer(x)
        return x * early.sigmoid()


# The second layer has a line of its own, for the first one's result keeps its name to the end.
GOLDEN = """
stem = Prologue(x)
early = _Block(stem)  # layers.0
early_1 = _Block(early)  # layers.1
early_1 = _Block(early_1)  # 5 times: layers.2 to layers.6
mul_gathered = Epilogue(early, early_1)
return mul_gathered
""".strip().splitlines()


def _built(model: nn.Module, kwargs: dict[str, Any]) -> PlannedProgram:
    return build(model, (), kwargs, CompileOptions(tp=2))


def _lines(code: str) -> list[str]:
    """The statements of the comment."""
    return re.findall(r"^#     (.*)$", code, re.MULTILINE)


def test_layers_that_are_chained_alike_are_one_line() -> None:
    built = _built(_Skipping(7), {"x": torch.randn(4, 6, 8)})
    assert _lines(built.code) == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_values_of_the_comment_are_those_of_the_program(name: str) -> None:
    """Running the statements with places instead of tensors passes each call what it takes."""
    built = _built(zoo.build(name, layers=2), zoo.inputs(name))
    program = built.program
    taken: list[list[Any]] = []

    def part(region: str, num_outputs: int) -> Any:
        def run(*args: Any) -> Any:
            index = len(taken)
            assert program.calls[index].region.name == region
            taken.append(list(args))
            places = tuple((index, output) for output in range(num_outputs))
            return places if num_outputs > 1 else places[0]

        return run

    namespace: dict[str, Any] = {
        identifier(each.name): part(each.name, len(each.outputs)) for each in program.regions
    }
    body: list[str] = []
    for line in _lines(built.code):
        statement, _, where = line.partition("  # ")
        times = re.match(r"(\d+) times", where)
        body += [statement] * (int(times[1]) if times else 1)
    inputs = {
        own
        for call in program.calls
        for ref, own in zip(call.args, call.region.input_names, strict=True)
        if ref.kind == "input"
    }
    source = "\n    ".join([f"def step({', '.join(inputs)}):", *body])
    exec(source, namespace)
    returned = namespace["step"](**{name: name for name in inputs})

    for call, args in zip(program.calls, taken, strict=True):
        named = zip(call.args, call.region.input_names, strict=True)
        expected = [
            (ref.index, ref.output) if ref.kind == "call" else own
            for ref, own in named
            if ref.kind in ("call", "input")
        ]
        assert args == expected
    outputs = [each for each in program.outputs if isinstance(each, Ref) and each.kind == "call"]
    places = [(ref.index, ref.output) for ref in outputs]
    assert returned == (tuple(places) if len(places) > 1 else places[0])
