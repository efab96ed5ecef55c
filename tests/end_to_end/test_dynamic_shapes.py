"""Programs that leave the sizes of their inputs open: one for many batches and lengths."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn import functional as F

from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.rules.table import record_factors
from sp_compiler.verification.interpret import PartitionedCode
from tests.helpers import parity
from tests.helpers.open_sizes import EXAMPLE, OTHERS, assert_right, open_program, reason, tokens
from tests.helpers.slow import slow
from tests.models import zoo
from tests.passes.sharding import test_megatron_layouts as test_layouts


@functools.cache
def _layer(name: str, tp: int) -> tuple[nn.Module, CompiledProgram]:
    """A model of one layer, and its program."""
    model = zoo.build(name, layers=1, dropout=0.1)
    return model, open_program(model, zoo.inputs(name, *EXAMPLE), tp=tp)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "others"), [("gpt2", 4, OTHERS), ("bert", 2, OTHERS[1:3])])
def test_one_program_serves_other_sizes(
    name: str, tp: int, others: tuple[tuple[int, int], ...]
) -> None:
    model, program = _layer(name, tp)
    for batch, seq in (EXAMPLE, *others):
        assert_right(program, model, zoo.inputs(name, batch, seq, seed=seq))


@pytest.mark.slow
def test_a_model_with_two_stacks() -> None:
    # Two layers: the first of each stack differs from all others.
    model, kwargs = zoo.build("t5", layers=2, dropout=0.1), zoo.inputs("t5", *EXAMPLE)
    program = open_program(model, kwargs, tp=2)
    assert_right(program, zoo.build("t5", layers=2, dropout=0.1), zoo.inputs("t5", 3, 17))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "none", "sequence_parallel": False, "outputs": "replicate"},
        {"recompute": "full", "dropout": "stored"},
    ],
)
def test_every_option(options: dict[str, Any]) -> None:
    model = zoo.build("gpt2", layers=1, dropout=0.1)
    program = open_program(model, zoo.inputs("gpt2", *EXAMPLE), tp=2, **options)
    kwargs = zoo.inputs("gpt2", 3, 15)
    found = parity.make_case(model, kwargs, dropout=options.get("dropout", "regenerate"))
    assert reason(program, kwargs) is None
    step = parity.simulate(found, program)
    assert parity.output_error(step, found) < 1e-10
    assert parity.gradient_error(step.grads, found.grads) < 1e-10


@pytest.mark.slow
def test_no_size_of_the_example_is_in_the_text() -> None:
    # Without overlap: in which order kernels hide a collective is a question of time, and times are
    # those of the example.
    programs = [
        open_program(zoo.build("llama", layers=1), zoo.inputs("llama", *sizes), tp=2, overlap=False)
        for sizes in (EXAMPLE, (3, 21))
    ]
    assert programs[0].code == programs[1].code
    assert "b*s" in programs[0].code
    # What is reported of a program is reported for the sizes of its example.
    plans = [program.plan for program in programs]
    assert plans[0].activation_peak_bytes < plans[1].activation_peak_bytes
    for plan in plans:
        assert "s" in str(plan.explain(next(iter(programs[0].param_placements))))


@pytest.mark.slow
def test_given_attention_masks() -> None:
    def padded(batch: int, seq: int) -> dict[str, Any]:
        kwargs = zoo.inputs("llama", batch, seq)
        mask = torch.ones(batch, seq, dtype=torch.int64)
        mask[0, seq // 2 :] = 0
        return {**kwargs, "attention_mask": mask}

    model = zoo.build("llama", layers=1)
    program = open_program(model, padded(*EXAMPLE), tp=2)
    for sizes in ((3, 17), (4, 8)):
        assert_right(program, model, padded(*sizes))


class Windowed(nn.Module):
    """Attention to the last ``window`` tokens, which is causal attention for short sequences."""

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device)
        apart = at[:, None] - at[None, :]
        mask = (apart >= 0) & (apart < self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def _windowed() -> nn.Module:
    torch.manual_seed(0)
    return Windowed().double()


@pytest.mark.slow
def test_a_mask_that_is_causal_for_short_sequences_only() -> None:
    program = open_program(_windowed(), {"x": tokens(2, 6)}, tp=2)
    assert "0.0, True" in program.code  # no mask
    assert_right(program, _windowed(), {"x": tokens(3, 8)})
    assert "attention mask" in str(reason(program, {"x": tokens(2, 9)}))
    longer = open_program(_windowed(), {"x": tokens(2, 12)}, tp=2)
    assert_right(longer, _windowed(), {"x": tokens(3, 17)})
    assert_right(longer, _windowed(), {"x": tokens(3, 5)})


def test_sizes_that_a_rule_compares_are_compared_for_other_calls_too() -> None:
    """Dims that are equal in the example alone are no reason to shard them together."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    graph = Graph()
    nodes = []
    for name, dtype in (("x", torch.float64), ("index", torch.int64)):
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(
            torch.zeros(4, 6, dtype=dtype), symbolic_context=context, source=ConstantSource(name)
        )
        nodes.append(node)
    node = graph.call_function(torch.ops.aten.gather.default, (nodes[0], 1, nodes[1]))
    node.meta["val"] = nodes[1].meta["val"]
    record_factors(node)
    assert [type(guard.expr) for guard in env.guards] == [sympy.Eq]


@pytest.mark.slow
def test_the_graphs_that_were_partitioned_run_for_other_sizes() -> None:
    model, program = _layer("gpt2", 4)
    parts = {name: PartitionedCode(region.partitioned) for name, region in program.regions.items()}
    backwards = {
        name: LossBackward(loss.output, parts[name].loss_backward)
        for name, loss in program.loss_backwards.items()
    }
    codes: dict[str, RegionCode] = {**parts}
    interpreted = dataclasses.replace(program, codes=codes, loss_backwards=backwards)
    assert_right(interpreted, model, zoo.inputs("gpt2", 3, 15))


class _Rearranged(nn.Module):
    """Tokens flattened batch first, then sequence first: rows of one rank go to several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        rows = x.reshape(batch * seq, width)
        rows = rows + self.down(F.gelu(self.up(self.norm(rows))))
        turned = rows.view(batch, seq, width).transpose(0, 1).reshape(seq * batch, width)
        turned = self.down(F.relu(self.up(turned)))
        return (turned.view(seq, batch, width).transpose(0, 1) * x).mean()


def _rearranged(batch: int, seq: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seq)
    return {"x": torch.randn(batch, seq, 16, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("sequence_parallel", [True, slow(False)])
def test_as_many_tokens_in_other_batches(sequence_parallel: bool) -> None:
    """Segments of rows are of the example's batch, whatever their sum is."""
    torch.manual_seed(0)
    model = _Rearranged().double()
    program = open_program(model, _rearranged(4, 16), tp=2, sequence_parallel=sequence_parallel)
    for batch, seq in ((4, 16), (16, 4), (8, 8), (2, 32), (4, 12), (5, 7)):
        kwargs = _rearranged(batch, seq)
        if reason(program, kwargs) is None:
            assert_right(program, model, kwargs)


class _ByEinsum(nn.Module):
    """Attention and experts by ``einsum``, at positions that are an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = test_layouts.EinsumAttention(), test_layouts.EinsumExperts()

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype)
        x = x + torch.einsum("t,d->td", at, torch.linspace(0.1, 1, 32, dtype=x.dtype)).cos()
        x = x + self.attention(x)
        return (x + self.experts(x)).square().mean()


@pytest.mark.slow
def test_products_by_einsum() -> None:
    torch.manual_seed(0)
    model = _ByEinsum().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(4)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seq)
        return {"x": torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64)}

    program = open_program(model, inputs(*EXAMPLE), tp=2)
    whole = [name for name, place in program.param_placements.items() if not place.is_sharded]
    assert whole == ["experts.router"]
    for batch, seq in (EXAMPLE, *OTHERS[1:4]):
        assert_right(program, model, inputs(batch, seq))


class _MeanOfScores(nn.Module):
    """A loss on attention weights, divided by their number, in which the sequence occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
        batch, length, _ = x.shape
        return (q @ k.mT).softmax(-1).square().sum() / (batch * length * length)


def test_inputs_that_are_slices() -> None:
    """Their strides are sizes of nothing that the program knows."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.down(self.up(x).relu() * scale).flatten(0, 1)

    def inputs(batch: int, seq: int) -> dict[str, Tensor]:
        x = torch.randn(batch, 40, 8, dtype=torch.float64)
        scale = torch.rand(16, 40, dtype=torch.float64, requires_grad=True)
        return {"x": x[:, :seq], "scale": scale[:, 0]}

    torch.manual_seed(0)
    model = Mlp().double()
    program = open_program(model, inputs(*EXAMPLE), tp=2)
    for batch, seq in OTHERS[:2]:
        assert_right(program, model, inputs(batch, seq))


def test_a_mean_over_two_dims_of_one_size() -> None:
    torch.manual_seed(0)
    model = _MeanOfScores().double()
    program = open_program(model, {"x": tokens(*EXAMPLE)}, tp=2)
    assert_right(program, model, {"x": tokens(3, 18)})


class _Part(nn.Module):
    """All but the last of turned activations, or three quarters of the tokens."""

    def __init__(self, share: float | None = None) -> None:
        super().__init__()
        self.share, self.up = share, nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        if self.share is None:
            return y.transpose(1, 2)[:, :-1].square().sum()
        return y[:, : int(self.share * x.shape[1])].square().sum()


def test_sizes_that_are_those_of_others_by_chance() -> None:
    """Of the example, 12 tokens are as many as there are features."""
    torch.manual_seed(0)
    model = _Part().double()
    program = open_program(model, {"x": tokens(*EXAMPLE)}, tp=2)
    assert_right(program, model, {"x": tokens(3, 18)})


def test_a_part_of_a_size_that_is_no_whole_number() -> None:
    """Nine tokens of 12, or of 13."""
    torch.manual_seed(0)
    model = _Part(0.75).double()
    program = open_program(model, {"x": tokens(*EXAMPLE)}, tp=2)
    assert_right(program, model, {"x": tokens(3, 13)})
    assert "TruncToInt(0.75" in (reason(program, {"x": tokens(3, 18)}) or "")
