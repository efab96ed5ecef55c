"""Names and string arguments are data: whatever they contain, they compile, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import parity

F64 = torch.float64


@torch.library.custom_op("sp_hostile::tagged", mutates_args=())
def tagged(x: Tensor, tag: str) -> Tensor:
    return x * len(tag)


@tagged.register_fake
def _(x: Tensor, tag: str) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.tag = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return tagged(grad, ctx.tag), None


tagged.register_autograd(_backward, setup_context=_setup)


class Layer(nn.Module):
    """A residual MLP whose modules and parameter are called ``name``."""

    def __init__(self, name: str, tag: str) -> None:
        super().__init__()
        self.tag, self.name = tag, name
        self.parts = nn.ModuleDict({name: nn.Linear(8, 16, dtype=F64)})
        self.down = nn.Linear(16, 8, dtype=F64)
        self.register_parameter(name, nn.Parameter(torch.ones(8, dtype=F64)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.parts[self.name](x)))
        return tagged(x + y * getattr(self, self.name), self.tag)


class Model(nn.Module):
    def __init__(self, name: str, tag: str) -> None:
        super().__init__()
        layer = type(name.replace("\0", ""), (Layer,), {})  # which Python allows in no class name
        self.layers = nn.ModuleDict({f"{name}{index}": layer(name, tag) for index in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


HOSTILE: dict[str, Callable[[str], str]] = {
    "ends the docstring": lambda path: f'"""\nopen({path!r}, "w")\n"""',
    "ends the comment": lambda path: f"x\nopen({path!r}, 'w')\r\n# ",
    "ends a literal": lambda path: f'\\" + open({path!r}, "w") + "\\',
    "no text": lambda path: "\0\x1a\f\u2028",
    "a keyword": lambda path: "class",
    "no identifier": lambda path: "A-b (c)",
    "taken": lambda path: "saved",
    "not ASCII": lambda path: "ﬁ名",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_runs_and_nothing_breaks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = HOSTILE[kind]("created")
    case = parity.make_case(Model(text, text), {"x": torch.randn(4, 8, dtype=F64)})
    program = parity.assert_parity(case, tp=2, recompute="selective")
    assert not list(tmp_path.iterdir())
    compile(program.code.encode(), "generated", "exec")  # as a file, too


class Written(nn.Module):
    """Parameters, a module and a buffer with names of a graph's own attributes; it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(8, dtype=F64))
        self.graph = nn.Linear(8, 8, dtype=F64)
        self.register_buffer("meta", torch.ones(8, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.graph(x) * self.code
        y += self.meta
        self.meta.mul_(2)
        return y.square().mean()


def test_names_of_a_graphs_own_attributes() -> None:
    """A model that writes in place is traced again, as a module with these attributes."""
    case = parity.make_case(Written(), {"x": torch.randn(4, 8, dtype=F64)})
    program = parity.assert_parity(case, tp=2)
    assert {"code", "graph.weight"} <= program.param_placements.keys()
    assert program.program.mutated_buffers.keys() == {"meta"}
