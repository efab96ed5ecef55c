"""Numbers that a forward reads while it is captured: what is recorded, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.decisions import hold
from sp_compiler.base.errors import CaptureError
from sp_compiler.trace.export import capture
from tests.helpers import parity

_MASK = torch.tensor([[True, False, True], [False, False, True]])
_X = torch.arange(12.0, dtype=torch.float64).reshape(2, 3, 2)


class Model(nn.Module):
    """``body(model, x, mask)`` beside a linear layer, a buffer and a plain tensor."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("table", torch.tensor([3, 1]))
        self.limit = torch.tensor(2)
        self.body = body

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        result = self.body(self, x, mask)
        return self.linear(x) * (1.0 if result is None else result)


def _captured(body: Callable[[Any, Tensor, Tensor], Any], **options: Any) -> Any:
    return capture(Model(body), (_X, _MASK), **options)


def _steps(module: Any) -> list[str]:
    """The operators of a decision, in order."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function")
    return [str(node.target).removeprefix("aten.") for node in nodes]


def _filled(model: Any, x: Tensor, mask: Tensor) -> float:
    mask = mask.clone()
    mask[0].zero_()
    if mask.view(-1)[:3].any():
        return 2.0
    return 3.0


def _emptied_later(model: Any, x: Tensor, mask: Tensor) -> float:
    count = mask.sum()
    copy = mask.clone()
    copy.zero_()
    return float(count + copy.sum())


def _counted(model: Any, x: Tensor, mask: Tensor) -> float:
    model.table[0] += 1
    return 2.0 if model.table.sum() <= 6 else 3.0


def _written_through_a_view(model: Any, x: Tensor, mask: Tensor) -> float:
    count = mask.sum()
    count.detach().view(1).mul_(2)
    return float(count)


def _written_in_a_list(model: Any, x: Tensor, mask: Tensor) -> float:
    count = mask.sum()
    torch._foreach_add_([count], 1)
    return float(count)


def _written_by_name(model: Any, x: Tensor, mask: Tensor) -> float:
    count = mask.sum()
    torch.add(count, 1, out=count)
    return float(count)


READS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], tuple[Any, ...], str, list[str]]] = {
    "any": (lambda m, x, mask: 2.0 if mask.any() else 1.0, (1,), "True", ["any.default"]),
    "item": (lambda m, x, mask: mask.sum().item(), (1,), "3", ["sum.default"]),
    "int": (lambda m, x, mask: int(x.max()), (0,), "11.0", ["max.default"]),
    "shape": (
        lambda m, x, mask: float(mask.sum() - mask.shape[1]),
        (1,),
        "0",
        ["sum.default", "sub.Tensor"],
    ),
    "buffer": (lambda m, x, mask: m.table[0].item(), ("table",), "3", ["select.int"]),
    "both": (
        lambda m, x, mask: float(m.table.sum() + mask.sum()),
        (1, "table"),
        "7",
        ["sum.default", "sum.default", "add.Tensor"],
    ),
    "attribute": (
        lambda m, x, mask: 2.0 if mask.sum() > m.limit else 1.0,
        (1,),
        "True",
        ["sum.default", "gt.Tensor"],
    ),
    "equal": (
        lambda m, x, mask: 2.0 if torch.equal(mask, ~mask) else 1.0,
        (1,),
        "False",
        ["bitwise_not.default", "eq.Tensor", "all.default"],
    ),
    "contains": (
        lambda m, x, mask: 2.0 if 3 in m.table else 1.0,
        ("table",),
        "True",
        ["eq.Scalar", "any.default"],
    ),
    # Writes into what is read belong to it.
    "write": (
        _filled,
        (1,),
        "False",
        [
            "clone.default", "select.int", "zero_.default", "view.default", "slice.Tensor",
            "any.default",
        ],
    ),
    "write behind": (
        _emptied_later,
        (1,),
        "3",
        ["sum.default", "clone.default", "zero_.default", "sum.default", "add.Tensor"],
    ),
    "buffer counted": (
        _counted,
        ("table",),
        "True",
        ["select.int", "add_.Tensor", "select.int", "copy_.default", "sum.default", "le.Scalar"],
    ),
    "write through a view": (
        _written_through_a_view,
        (1,),
        "6",
        ["sum.default", "detach.default", "view.default", "mul_.Tensor"],
    ),
    "write of a list": (
        _written_in_a_list, (1,), "4", ["sum.default", "_foreach_add_.Scalar"]
    ),
    "write by name": (_written_by_name, (1,), "4", ["sum.default", "add.out"]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_recorded_with_its_computation(name: str) -> None:
    body, sources, value, steps = READS[name]
    before = _MASK.clone()
    (decision,) = _captured(body).decisions
    assert sorted(map(str, decision.sources)) == sorted(map(str, sources))
    assert decision.value == value
    assert _steps(decision.module) == steps
    assert decision.line.startswith("test_decisions.py:")
    assert str(decision) == f"{decision.line} -> {value}"
    model = Model(body)
    assert hold([decision], [_X, _MASK], dict(model.named_buffers()))
    assert torch.equal(_MASK, before)  # a decision that writes does so in a copy


@pytest.mark.parametrize(
    ("name", "leaves", "holds"),
    [
        ("any", [_X, ~_MASK], True),
        ("any", [_X, _MASK & False], False),
        ("item", [_X, ~_MASK], True),
        ("item", [_X, _MASK | True], False),
        ("write", [_X, _MASK & False], True),
        ("write", [_X, _MASK | True], True),
        ("int", [-_X, _MASK], False),
    ],
)
def test_which_calls_decide_alike(name: str, leaves: list[Tensor], holds: bool) -> None:
    captured = _captured(READS[name][0])
    assert hold(captured.decisions, leaves, {}) == holds


def test_with_open_sizes_a_decision_holds_for_all_of_them() -> None:
    captured = _captured(lambda m, x, mask: 2.0 if mask.sum() == mask.shape[1] else 1.0,
                         open_dims=True)  # fmt: skip
    (decision,) = captured.decisions
    assert decision.value == "True"
    assert hold([decision], [None, torch.eye(5, dtype=torch.bool)], {})
    assert not hold([decision], [None, torch.ones(5, 5, dtype=torch.bool)], {})


def test_the_same_question_is_asked_once() -> None:
    def layers(model: Any, x: Tensor, mask: Tensor) -> float:
        return float(sum(2.0 for _ in range(3) if mask.any()) + (1.0 if mask.all() else 0.0))

    assert [decision.value for decision in _captured(layers).decisions] == ["True", "False"]


def test_a_list_is_read_number_by_number() -> None:
    captured = _captured(lambda m, x, mask: float(sum(mask.sum(1).tolist())))
    assert [decision.value for decision in captured.decisions] == ["2", "1"]


def test_constants_decide_nothing() -> None:
    captured = _captured(lambda m, x, mask: m.limit.item() + torch.tensor(1).item())
    assert not captured.decisions


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("buffer counted", [2.0, 2.0, 3.0, 3.0]),
        ("write through a view", [6.0] * 4),
        ("write of a list", [4.0] * 4),
    ],
)
def test_calls_take_the_path_of_the_model(name: str, values: list[float]) -> None:
    eager = Model(READS[name][0])
    module = sp_compiler.compile(copy.deepcopy(eager), tp=1)
    for value in values:
        torch.testing.assert_close(module(_X, _MASK), eager.linear(_X) * value)
        eager(_X, _MASK)
        assert torch.equal(module.get_buffer("table"), eager.get_buffer("table"))


def _assigned(model: Any, x: Tensor, mask: Tensor) -> None:
    model.table.data = model.table + 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (_assigned, "assigns .data of a tensor"),
        (lambda m, x, mask: len(f"{mask}"), "text of a tensor"),
        (lambda m, x, mask: len(f"{m.linear(x).sum()}"), "text of a tensor"),
    ],
)
def test_what_leaves_no_trace_is_refused(
    body: Callable[[Any, Tensor, Tensor], Any], reason: str
) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        _captured(body)
    assert "test_decisions.py:" in str(caught.value)


@pytest.mark.parametrize("make", [str, repr, "{}".format])
def test_a_symbol_in_text_is_said_with_its_line(make: Callable[[Any], str]) -> None:
    """``print(x.mean().item())`` would print "zuf0", once, without a word."""

    def body(model: Any, x: Tensor, mask: Tensor) -> float:
        make(model.linear(x).mean().item())
        return 2.0

    with pytest.warns(UserWarning, match=r"once, in the capture.*test_decisions.py:\d+ make"):
        _captured(body)


def test_text_of_what_is_known_is_the_number() -> None:
    def body(model: Any, x: Tensor, mask: Tensor) -> float:
        return float(f"{mask.sum().item()}{x.shape[0]}")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = _captured(body)
    assert [decision.value for decision in captured.decisions] == ["3"]


def test_text_of_a_tensor_without_dims_is_that_of_its_number() -> None:
    """Models that put images among their tokens count those, in text for an error."""

    def body(model: Any, x: Tensor, mask: Tensor) -> float:
        return float(f"{mask.sum()}{x.mean() / 2:.2f}")

    captured = _captured(body)
    assert [decision.value for decision in captured.decisions] == ["3", "2.75"]
    assert hold(captured.decisions, [_X, _MASK.flip(0)], {})
    assert not hold(captured.decisions, [_X, ~_MASK & False], {})
    assert not hold(captured.decisions, [_X + 1, _MASK], {})


def _cast(model: Any, x: Tensor, mask: Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        y = x.float()[0].mT @ x.float()[0]
    return 2.0 if y.sum() > 0 else 1.0


def _written(model: Any, x: Tensor, mask: Tensor) -> float:
    x = x.clone()
    x[0] = model.linear(x)[0]
    return 2.0 if x.sum() > 0 else 1.0


@pytest.mark.parametrize(
    ("body", "depends"),
    [
        (lambda m, x, mask: 2.0 if m.linear(x).sum() > 0 else 1.0, "parameter 'linear.weight'"),
        (lambda m, x, mask: 2.0 if m.linear.bias.norm() > 0 else 1.0, "parameter 'linear.bias'"),
        (_written, "parameter 'linear.weight'"),
        (lambda m, x, mask: 2.0 if torch.rand(()) > 0.5 else 1.0, "random numbers"),
        (_cast, "a computation under the model's own autocast"),
        (lambda m, x, mask: len(torch.unique(m.linear(x))), "a branch, loop or size"),
    ],
)
def test_what_no_call_knows_before_is_refused_with_its_line(
    body: Callable[[Any, Tensor, Tensor], Any],
    depends: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(CaptureError, match=depends) as caught:
        _captured(body)
    first, *_, last = str(caught.value).splitlines()
    assert depends in first
    assert "test_decisions.py:" in first
    assert last.startswith("  what to do: ")
    # Nothing of torch's, which has the graph so far and symbols of its own.
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_example_without_numbers_is_refused() -> None:
    model = Model(READS["any"][0]).to("meta")
    with pytest.raises(CaptureError, match="an example without values"):
        capture(model, (_X.to("meta"), _MASK.to("meta")))
    assert len(capture(model, (_X, _MASK)).decisions) == 1  # parameters need none


class Padded(nn.Module):
    """Attends to what is not padding, and leaves the mask out where nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.mT
        if padding.any():
            scores = scores.masked_fill(padding[:, None, None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_either_path_is_sharded_and_right(tp: int, padded: bool) -> None:
    torch.manual_seed(0)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 3] = padded
    inputs = {"x": torch.randn(2, 4, 8, dtype=torch.float64), "padding": padding}
    case = parity.make_case(Padded().double(), inputs)
    parity.assert_parity(case, tp=tp)
    assert [decision.value for decision in case.program.decisions] == [str(padded)]
