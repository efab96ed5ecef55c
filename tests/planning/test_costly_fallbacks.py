"""A fallback that takes a good part of a step warns once, or is refused with ``strict=True``."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.passes.sharding import alternatives
from sp_compiler.planning import costly_fallbacks as costly_module
from sp_compiler.planning.fallbacks import Fallback
from sp_compiler.solve.elimination import Elimination
from tests.helpers.ranks import run_on_ranks
from tests.helpers.slow import slow
from tests.models import zoo

_WIDTH = 32


@torch.library.custom_op("costly_test::twist", mutates_args=())
def twist(x: Tensor) -> Tensor:
    """Without a rule."""
    return x * 2


twist.register_fake(torch.empty_like)
twist.register_autograd(lambda ctx, grad: grad * 2)


class Attention(nn.Module):
    """Its values pass through an operator without a rule: nothing of it can be sharded."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 4, _WIDTH // 4)
        q, k, v = (twist(p(x)).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.fused:
            context = F.scaled_dot_product_attention(q, k, v)
        else:
            context = twist(q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(twist(context.transpose(1, 2).reshape(x.shape)))


class Model(nn.Module):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.attention = Attention(fused)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x).square().mean()


def _inputs() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(2, 8, _WIDTH),), {}


@pytest.mark.parametrize("fused", [True, False])
def test_an_attention_core_that_runs_replicated(fused: bool) -> None:
    costly = sp_compiler.plan(Model(fused), _inputs(), tp=2).costly_fallbacks
    (core,) = (item for item in costly if item.share.startswith("an attention core"))
    assert core.module == "attention"
    assert "(2, 4, 8, 8)" in core.reason
    # The cause, by its name, and what to do.
    causes = [item for item in costly if "sp_compiler.rule" in item.advice]
    assert causes
    assert {item.reason.split(" (x")[0] for item in causes} == {
        "no sharding rule for costly_test.twist.default"
    }


def test_the_plan_lists_it_and_strict_refuses_it() -> None:
    assert "Costly fallbacks\n" in str(sp_compiler.plan(Model(), _inputs(), tp=2))
    with pytest.raises(UnsupportedError, match="attention core") as refused:
        sp_compiler.plan(Model(), _inputs(), tp=2, strict=True)
    assert "no sharding rule" in str(refused.value)
    assert sp_compiler.plan(Model(), _inputs(), tp=1, strict=True).costly_fallbacks == ()
    with pytest.raises(ArgumentError, match="strict=1"):
        sp_compiler.plan(Model(), _inputs(), strict=1)  # type: ignore[call-overload]


def test_parameters_that_no_rank_count_divides() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    result = sp_compiler.plan(model, ((torch.randn(4, 3, 5),), {}), tp=2)
    products = result.costly_fallbacks[1:]
    assert [item.module for item in products] == ["0", "1"]
    # Of those of one rank: every rank computes all of them.
    assert [item.share for item in products] == ["50.0% of the matrix FLOPs"] * 2
    costly = result.costly_fallbacks[0]
    assert costly.module == "0.weight and 1 more like it"
    assert "no dim is divisible by 2" in costly.reason
    assert "tp" in costly.advice


def test_convolutions_whose_channels_do_not_divide() -> None:
    """Over a padded, a plain and a spread image; beside them one of even channels is sharded."""
    widths = {"strided": 21, "same": 21, "spread": 21, "even": 8}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strided = nn.Conv2d(3, widths["strided"], 4, stride=4)
            self.same = nn.Conv1d(21, widths["same"], 3, padding="same")
            self.spread = nn.ConvTranspose1d(21, widths["spread"], 2, 2)
            self.even = nn.Conv1d(21, widths["even"], 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.same(self.strided(x).flatten(2)).relu()
            return self.even(self.spread(x)).square().mean()

    plan = sp_compiler.plan(Model(), ((torch.randn(3, 3, 32, 32),), {}), tp=2)
    products = {x.module: x for x in plan.costly_fallbacks if x.share.endswith("matrix FLOPs")}
    assert products.keys() == {"strided", "same", "spread"}
    for item in products.values():
        assert item.reason.endswith("over 2 ranks: its 21 channels are not divisible")
        assert item.advice == "Choose a tp that divides 21"
    assert not any("even" in line for line in plan.fallbacks)


@pytest.mark.parametrize(
    ("convolution", "why", "advice"),
    [
        (
            nn.Conv1d(6, 6, 3, groups=3),
            "its 3 groups are not divisible",
            "Choose a tp that divides 3",
        ),
        (
            nn.ConvTranspose1d(6, 6, 3, groups=3),
            "its 3 groups are not divisible",
            "Choose a tp that divides 3",
        ),
        (nn.Conv1d(6, 1, 3), "its 1 channels are not divisible", ""),
    ],
)
def test_convolutions_say_what_does_not_divide(
    convolution: nn.Module, why: str, advice: str
) -> None:
    model = nn.Sequential(nn.Conv1d(6, 6, 3), convolution)
    costly = sp_compiler.plan(model, ((torch.randn(3, 6, 32),), {}), tp=2).costly_fallbacks
    (item,) = (x for x in costly if x.share.endswith("matrix FLOPs"))
    assert (item.module, item.advice) == ("1", advice)
    assert item.reason.endswith(why)


class _Scores(nn.Module):
    """Scores of heads that are mixed by a weight, a parameter of its own."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, nn.Linear(_WIDTH, _WIDTH)
        self.mix = nn.Parameter(torch.ones(heads, heads))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return torch.einsum("hg,bgij->bhij", self.mix, heads @ heads.transpose(-1, -2))


def test_a_product_whose_shards_do_not_pay_has_the_price_of_them() -> None:
    model = nn.Sequential(_Scores(4))
    plan = sp_compiler.plan(model, ((torch.randn(4, 12, _WIDTH),), {}), tp=2)
    (item,) = (item for item in plan.costly_fallbacks if item.module == "0")
    shapes = re.escape("(4, 12, 12, 4) x (4, 4)")
    said = f"sharding {shapes} over 2 ranks is not worthwhile: it would cost (.*) us more a step "
    priced = re.match(said + r"\(.* us more communication, .* us less compute\)", item.reason)
    assert priced, item.reason
    # The words name what explain() takes, and it finds the same price.
    (name,) = re.findall(r"explain\('(.*)'\) of the plan", item.advice)
    (mix,) = (each for each in plan.explain(name).parameters if each.name == "0.mix")
    ways = [way for way in mix.operators[0].ways if {*way.operands} & {"S(3)", "T(3)", "S(0)"}]
    assert float(priced[1]) == round(min(way.more_us for way in ways if way.possible), 1)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(alternatives, "_ESTIMATED_SHARE", 2.0), (Elimination, "run", lambda self: None)],
)
def test_small_products_and_slow_solutions_have_no_price(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(module, name, value)
    example: Any = (torch.randn(4, 12, _WIDTH),), {}
    plan = sp_compiler.plan(nn.Sequential(_Scores(4)), example, tp=2)
    reason = "sharding (4, 12, 12, 4) x (4, 4) over 2 ranks is not worthwhile"
    assert reason in {item.reason for item in plan.costly_fallbacks}


@pytest.mark.parametrize(
    ("batch", "tokens", "width", "why"),
    [
        (3, 9, 15, "none of its sizes is divisible"),
        (
            4,
            9,
            15,
            "batch and tokens are not sharded here, and no other dim is both divisible and ",
        ),
    ],
)
def test_a_product_without_a_way_is_not_said_not_to_pay(
    batch: int, tokens: int, width: int, why: str
) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            x = twist(self.linear(x))
            return x @ x.transpose(-1, -2)

    x = torch.randn(batch, tokens, width)
    plan = sp_compiler.plan(Scores(), ((x,), {}), tp=2)
    shapes = f"({batch}, {tokens}, {width}) x ({batch}, {width}, {tokens})"
    reasons = [item.reason for item in plan.costly_fallbacks]
    assert any(text.startswith(f"no way to shard {shapes} over 2 ranks: {why}") for text in reasons)


def test_a_core_of_a_short_sequence_has_no_share_of_zero() -> None:
    share = costly_module._share_text
    assert share(0.0004, is_attention=True).endswith("grows with the square of the sequence")
    assert share(0.004, is_attention=True) == "an attention core, 0.4% of the matrix FLOPs"
    assert share(0.0004, is_attention=False) == "under 0.1% of the matrix FLOPs"


@pytest.mark.parametrize(
    ("listed", "parts"),
    [
        # Each (FLOPs of 1000, bytes of 1000), by name; those of less than 1 % beside larger ones.
        (["large"], {"large": (500, 0), "small": (9, 0)}),
        (["large", "limit"], {"limit": (0, 10), "large": (0, 20), "small": (0, 9)}),
        (["first", "second"], {"first": (9, 0), "second": (8, 0)}),  # together they are a burden
        ([], {"small": (9, 0)}),
    ],
)
def test_small_parts_are_left_out_beside_large_ones(
    monkeypatch: pytest.MonkeyPatch, listed: list[str], parts: dict[str, tuple[int, int]]
) -> None:
    found = [
        Fallback(name, name, "a reason", flops=flops, num_bytes=num_bytes)
        for name, (flops, num_bytes) in parts.items()
    ]
    monkeypatch.setattr(costly_module, "all_fallbacks", lambda compiled: found)
    for total in ("_total_flops", "_total_bytes"):
        monkeypatch.setattr(costly_module, total, lambda compiled: 1000)
    program: Any = None
    assert [item.module for item in costly_module.costly_fallbacks(program)] == listed


def test_what_a_hint_asks_for_is_no_fallback() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hints = {"0": torch.distributed.tensor.Replicate(), "1": torch.distributed.tensor.Replicate()}
    result = sp_compiler.plan(model, ((torch.randn(4, 3, 32),), {}), hints=hints, strict=True)
    assert result.fallbacks
    assert result.costly_fallbacks == ()


@pytest.mark.parametrize("name", ["gpt2", slow("lora")])
def test_a_model_that_shards(name: str) -> None:
    model = zoo.build(name, layers=1, dtype=torch.float32)
    sp_compiler.plan(model, ((), zoo.inputs(name)), tp=2, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "encoder"])
def test_models_of_other_architectures_shard(name: str) -> None:
    sp_compiler.plan(zoo.build(name, layers=1), ((), zoo.inputs(name)), tp=4, strict=True)


class _Classifier(nn.Module):
    """Its last operators are in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(fused=True)
        self.classes = nn.Linear(_WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.classes(twist(self.attention(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_models_own_forward_is_named_by_its_line() -> None:
    """But a loss over few classes, cheap on every rank, by no line at all."""
    labels = torch.zeros(2, 8, dtype=torch.long)
    found = sp_compiler.plan(_Classifier(), ((torch.randn(2, 8, _WIDTH), labels), {}), tp=2)
    lines = [*found.fallbacks, *map(str, found.costly_fallbacks)]
    assert not any("cross_entropy" in line or "classes costs" in line for line in lines)
    (line,) = (line for line in found.fallbacks if "in (model) of" in line)
    assert "runs replicated (test_costly_fallbacks.py:" in line
    assert "twist(self.attention(x))" in line
    (item,) = (item for item in found.costly_fallbacks if "(self.attention(x))" in item.module)
    assert item.module.startswith("test_costly_fallbacks.py:")


def _heard() -> dict[str, Any]:
    model = Model()
    with pytest.raises(UnsupportedError, match="attention core"):
        sp_compiler.compile(model, tp=2, example_inputs=_inputs(), strict=True)
    (x,), _ = _inputs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        module = sp_compiler.compile(model, tp=2)  # the refusal left it as it was
        module(torch.ones_like(x))
        module(torch.ones(3, 6, _WIDTH))
        backend = torch.compile(Model(), backend="sp_compiler", options={"tp": 2})
        backend(torch.ones_like(x))
    return {
        "texts": [str(item.message) for item in said if "costly parts" in str(item.message)],
        "files": {item.filename for item in said if "costly parts" in str(item.message)},
    }


@pytest.mark.slow
def test_compile_warns_once_on_rank_0() -> None:
    first, second = run_on_ranks(2, _heard)
    assert second["texts"] == []
    assert len(first["texts"]) == 2  # one of compile, whatever the sizes, one of torch.compile
    for text in first["texts"]:
        assert "attention core" in text
        assert "strict=True" in text
