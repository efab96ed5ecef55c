"""The sharding pass alone: its rewrite as text, near-misses, counts, metadata and numbers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sp_compiler import PassError
from sp_compiler.base.placement import I, Placement, R, S
from sp_compiler.cost.hardware import H100
from sp_compiler.ir.compiled_program import CompiledProgram, RegionCode
from sp_compiler.ir.op_traits import is_collective
from sp_compiler.ir.program import Program
from sp_compiler.ir.text import render
from sp_compiler.options import CompileOptions
from sp_compiler.passes.sharding.dim_roles import RegionValues
from sp_compiler.passes.sharding.prices import Prices
from sp_compiler.passes.sharding.shard import Sharded, shard
from sp_compiler.planning.build import make_plan
from sp_compiler.verification.interpret import ShardedCode
from tests.goldens import check_golden
from tests.helpers import parity

RANKS = 2
WIDTH = 8


class Mlp(nn.Module):
    """A residual perceptron; its hidden dim can be sharded."""

    def __init__(self, hidden: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Tied(nn.Module):
    """One parameter used twice, by its rows and by its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.table.T) @ self.table


class ThreeHeads(nn.Module):
    """Attention between the three heads of each token, which do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (3, 2))
        return self.down((heads @ heads.transpose(-1, -2) @ heads).flatten(-2))


class ThreeGroups(nn.Module):
    """A convolution of three channels, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1, groups=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x[:, :3]))


class Inverse(nn.Module):
    """An operator without a sharding rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) @ torch.linalg.inv(self.weight)


class FromRows(nn.Module):
    """An operator with a sharding rule, which does not cover rows that replace others."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.flatten(0, 1).index_put((torch.tensor([0, 3]),), self.rows))


class Layers(nn.Module):
    """Two layers, which share a region; between them the tokens are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Mlp(8 * WIDTH), Mlp(8 * WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Penalized(nn.Module):
    """A parameter that shards of the tokens read, and that is penalized as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Mlp(8 * WIDTH), Mlp(8 * WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for mlp in (self.first, self.last):
            x = x + mlp.down(F.relu(mlp.up(mlp.norm(x) * self.scale)))
        return x.sum() + self.scale.square().sum()


class Reader(nn.Module):
    """Cross-attention with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y + self.out(F.scaled_dot_product_attention(y, self.key(x), x))


class Readers(nn.Module):
    """Layers that all read one input of the model besides what the one before returns."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.layers = nn.ModuleList([Reader(), Reader()])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.start.expand(len(x), -1, -1))
        for layer in self.layers:
            y = layer(y, x)
        return y


REWRITTEN: dict[str, Any] = {
    "mlp": Mlp,
    "biased_mlp": functools.partial(Mlp, bias=True),
    "padded_mlp": functools.partial(Mlp, hidden=15),
    "tied": Tied,
    "layers": Layers,
}
NEAR_MISSES: dict[str, tuple[Any, str]] = {
    "three heads": (ThreeHeads, "up.weight is replicated: (6x8) the operator that reads it runs"),
    "three groups": (ThreeGroups, "no dim is divisible by 2, and padding is not worthwhile"),
    "no rule": (Inverse, "weight is replicated: (8x8) no sharding rule for aten.linalg_inv"),
    "no rule for this call": (
        FromRows,
        "(2x8) no sharding rule for aten.index_put.default with these shapes and arguments",
    ),
}

DECLINED = {
    "no rule": {"there is no sharding rule for it"},
    "no rule for this call": {"there is no sharding rule for it with these shapes and arguments"},
}


@functools.cache
def case(model: Any, batch: int = 2) -> parity.Case:
    torch.manual_seed(0)
    return parity.make_case(model().double(), {"x": torch.randn(batch, 4, WIDTH).double()})


def sharded(found: parity.Case, **options: Any) -> Sharded:
    return shard(found.program, CompileOptions(tp=RANKS, **options))


def text(program: Program) -> str:
    parts = [f"{region.name}:\n{render(region.module)}" for region in program.regions]
    return "\n\n".join(parts)


def collectives(program: Program) -> list[tuple[str, str]]:
    """(source, destination) of each in a call, in the order in which they run."""
    nodes = [node for call in program.calls for node in call.region.module.graph.nodes]
    return [(node.args[1], node.args[2]) for node in nodes if is_collective(node)]


@pytest.mark.parametrize("name", REWRITTEN)
def test_text_before_and_after(name: str) -> None:
    found = case(REWRITTEN[name])
    before = text(found.program)
    after = text(sharded(found).program)
    assert text(found.program) == before, "the input is left as it is"
    check_golden(f"sharding/{name}.txt", f"{before}\n\n===== on {RANKS} ranks\n\n{after}")


_SUM = [("P", "I")]


@pytest.mark.parametrize("name", sorted(REWRITTEN.keys() - {"layers"}))
def test_one_sum_over_the_ranks(name: str) -> None:
    """Alone, a perceptron has nothing before and after it that could be sharded by tokens."""
    assert collectives(sharded(case(REWRITTEN[name])).program) == _SUM


def test_layers_exchange_tokens() -> None:
    """Each gathers its tokens and scatters its sum; the model's result is gathered once."""
    found = collectives(sharded(case(Layers)).program)
    assert found == [("S(0)", "R"), ("P", "S(0)")] * 2 + [("S(0)", "I")]
    assert collectives(sharded(case(Layers), sequence_parallel=False).program) == _SUM * 2


def test_placements_of_parameters() -> None:
    assert sharded(case(REWRITTEN["biased_mlp"])).param_placements == {
        "norm.weight": I,
        "up.weight": S(0),
        "up.bias": S(0),
        "down.weight": S(1),
        "down.bias": I,  # added once, after the sum over the ranks
    }
    assert sharded(case(Tied)).param_placements == {"table": S(0)}
    padded = sharded(case(REWRITTEN["padded_mlp"])).param_placements
    assert padded["up.weight"].local_shape((15, WIDTH), RANKS) == (8, WIDTH)


@pytest.mark.parametrize("name", REWRITTEN)
def test_every_node_has_its_value_and_placement(name: str) -> None:
    for region in sharded(case(REWRITTEN[name])).program.regions:
        region.module.graph.lint()
        for node in region.module.graph.nodes:
            if node.op == "output":
                continue
            assert all(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta["val"]))
            assert "requires_grad" in node.meta
            assert node.op != "placeholder" or isinstance(node.meta["placement"], Placement)
        placements = [node.meta["placement"] for node in region.placeholders]
        assert list(region.input_placements) == placements


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_and_say_why(name: str) -> None:
    model, reason = NEAR_MISSES[name]
    found = case(model)
    result = sharded(found, sequence_parallel=False)
    assert set(result.param_placements.values()) == {I}
    assert not collectives(result.program)
    (before,), (after,) = found.program.regions, result.program.regions
    assert render(after.module, metas=["val"]) == render(before.module, metas=["val"])
    assert {node.meta["placement"] for node in after.module.graph.nodes if node.op != "output"} <= {
        I,
        R,
    }
    options = CompileOptions(tp=RANKS, sequence_parallel=False)
    plan = make_plan(parity.compiled(found, tp=RANKS, sequence_parallel=False), options)
    assert any(reason in fallback for fallback in plan.fallbacks), plan.fallbacks
    (report,) = (each for each in plan.passes if each.name == "shard")
    assert {item.reason for item in report.declined} == DECLINED.get(name, set())


def test_one_rank_converts_nothing() -> None:
    found = case(Mlp)
    result = shard(found.program, CompileOptions(tp=1))
    assert not collectives(result.program)
    assert render(result.program.regions[0].module, metas=["val"]) == render(
        found.program.regions[0].module, metas=["val"]
    )


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_sharded_program_is_refused(ranks: int) -> None:
    options = CompileOptions(tp=ranks)
    once = shard(case(Mlp).program, options)
    with pytest.raises(PassError, match=r"\[shard\] .*sharded already"):
        shard(once.program, options)


def test_what_a_rank_stores_beyond_an_even_share_has_a_price() -> None:
    program = case(Mlp).program
    facts = [RegionValues() for _ in program.regions]
    params = (node for each in program.regions for node in each.placeholders)
    (up,) = (node for node in params if tuple(node.meta["val"].shape) == (16, WIDTH))
    two, four = (Prices(program, facts, ranks, 1, {}, H100) for ranks in (2, 4))
    assert two.stored_us((up, 0), S(0)) == four.stored_us((up, 0), S(0)) == 0
    # A replicated one is stored beyond 1/2 and 1/4.
    assert two.stored_us((up, 0), I) * 3 / 2 == pytest.approx(four.stored_us((up, 0), I)) != 0


def on_ranks(result: Sharded, program: Program | None = None) -> CompiledProgram:
    """The regions as autograd runs them, without any later pass."""
    program = program or result.program
    codes: dict[str, RegionCode] = {
        region.name: ShardedCode(region, [bool(n.meta["requires_grad"]) for n in region.outputs])
        for region in program.regions
    }
    return CompiledProgram(program, codes, result.param_placements, RANKS)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", REWRITTEN)
def test_numbers(name: str, batch: int) -> None:
    found = case(REWRITTEN[name], batch)
    parity.assert_step(found, on_ranks(sharded(found)), tolerance=1e-12)


def test_a_parameter_read_by_shards_and_as_a_whole() -> None:
    """Its two gradients, a partial and a full one, are added where both are full."""
    found = case(Penalized)
    parity.assert_step(found, on_ranks(sharded(found)), tolerance=1e-12)


def test_an_input_with_a_gradient_that_equal_layers_read() -> None:
    """Its place in their region is one value of the placement problem, not one per layer."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    found = parity.make_case(Readers().double(), {"x": x})
    assert len(found.program.calls) > len(found.program.regions)
    parity.assert_step(found, on_ranks(sharded(found)), tolerance=1e-12)


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_same_check_fails_without_the_rewrite(name: str) -> None:
    found = case(REWRITTEN[name])
    result = sharded(found, sequence_parallel=False)
    parity.assert_step(found, on_ranks(result), tolerance=1e-12)
    originals = {region.name: region.module for region in found.program.regions}
    calls = [
        replace(
            call,
            region=replace(call.region, module=originals.get(call.region.name, call.region.module)),
        )
        for call in result.program.calls
    ]
    with pytest.raises((AssertionError, RuntimeError)):
        parity.assert_step(found, on_ranks(result, replace(result.program, calls=calls)))
