"""Errors while a step runs name the module and the line of the model, and the generated line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.inductor.fused import Fused

NUM_KINDS = 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.kinds = nn.Embedding(NUM_KINDS, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        added = self.kinds(kind)
        return x + self.down(F.gelu(self.up(x) + added))


class Model(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, ids: Tensor, kind: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, kind)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def _inputs(**wrong: int) -> dict[str, Tensor]:
    inputs = {name: torch.zeros(2, 4, dtype=torch.long) for name in ("ids", "kind", "labels")}
    for name, value in wrong.items():
        inputs[name][1, 2] = value
    return inputs


def _module(**options: Any) -> Any:
    return sp_compiler.compile(Model(), tp=1, example_inputs=((), _inputs()), **options)


def _line(code: str) -> str:
    """``code``, a line of this file, as an error names it."""
    path = Path(__file__)
    number = [line.strip() for line in path.read_text().splitlines()].index(code) + 1
    return f"{path.name}:{number} {code}"


def _note(error: BaseException) -> str:
    (note,) = error.__notes__
    return str(note)


@pytest.mark.parametrize(
    ("wrong", "module", "code", "statement"),
    [
        (
            {"ids": 11},
            "embedding",
            "x = self.embedding(ids)",
            "Prologue.forward: embedding = torch.embedding(embedding_weight, ids)",
        ),
        (
            {"kind": NUM_KINDS},
            "kinds of one of layers.0, layers.1, ... layers.3",
            "added = self.kinds(kind)",
            "Layer.forward: kinds = torch.embedding(kinds_weight, kind)",
        ),
        (
            {"labels": 8},
            "(model)",
            "return F.cross_entropy(x.flatten(0, 1), labels.flatten())",
            "Epilogue.forward: nll_loss_forward_0, ",
        ),
    ],
)
def test_an_error_in_forward(wrong: dict[str, int], module: str, code: str, statement: str) -> None:
    compiled = _module()
    with pytest.raises(IndexError) as caught:
        compiled(**_inputs(**wrong))
    place, generated = _note(caught.value).splitlines()
    assert place == f"in {module}: {_line(code)}"
    number = int(generated.removeprefix("as line ").partition(" ")[0])
    assert generated.startswith(f"as line {number} of the generated code, in {statement}")
    assert compiled.code.splitlines()[number - 1].split()[0] in statement
    compiled(**_inputs()).backward()  # the error leaves nothing behind


def test_an_error_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = _module(recompute="none")(**_inputs())

    def full(*_: Any) -> Tensor:
        raise MemoryError("a device is full")

    monkeypatch.setattr(torch, "mm", full)
    with pytest.raises(MemoryError, match="a device is full") as caught:
        loss.backward()
    place, generated = _note(caught.value).splitlines()
    line = _line("return x + self.down(F.gelu(self.up(x) + added))")
    assert place == f"in down of one of layers.0, layers.1, ... layers.3: {line}"
    assert "in Layer.backward: " in generated


def test_what_a_backend_has_compiled_into_one_function_has_a_last_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = _module(backend="inductor")

    def fails(*_: Any) -> Any:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Fused, "compile", lambda fused: "")
    monkeypatch.setattr(Fused, "_run", fails)
    with pytest.raises(RuntimeError, match="a kernel failed") as caught, torch.no_grad():
        module(**_inputs())
    place, generated = _note(caught.value).splitlines()
    layers = "one of layers.0, layers.1, ... layers.3"
    line = _line("return x + self.down(F.gelu(self.up(x) + added))")
    assert place == f"in or before {layers}: {line}"
    assert "in Layer.forward: up, x = Layer.forward_1(tp, " in generated


def test_our_own_errors_have_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module()

    def refused(*_: Any) -> Tensor:
        raise UnsupportedError("said already")

    monkeypatch.setattr(torch, "embedding", refused)
    with pytest.raises(UnsupportedError) as caught:
        module(**_inputs())
    assert not hasattr(caught.value, "__notes__")


def test_edited_code_is_known_by_its_line() -> None:
    module = _module()
    text = module.code.replace("F.gelu(", "F.gelo(")
    with pytest.raises(ArgumentError, match=r"gelo.*\nin line \d+ of the generated code, in Layer"):
        module.load_code(text, ((), _inputs()))
