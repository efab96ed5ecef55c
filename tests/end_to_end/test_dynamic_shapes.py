"""Programs that leave the sizes of their inputs open: one for many batches and lengths."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
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

import sp_compiler
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.options import CompileOptions
from sp_compiler.rules.table import record_factors
from sp_compiler.runtime.program_cache import ProgramCache, call_key
from sp_compiler.trace.export import flatten_inputs
from sp_compiler.verification.interpret import PartitionedCode
from tests.helpers import parity, users
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo
from tests.passes.sharding import test_megatron_layouts as test_layouts

_EXAMPLE = (2, 12)
# Dividing and not, equal sizes, sizes that are those of the model (8 and 32), one row a rank.
_OTHERS = ((2, 16), (3, 17), (4, 4), (8, 8), (5, 7), (2, 32))


def _open(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> CompiledProgram:
    found = build(model, (), kwargs, CompileOptions(**options), lift_casts=True, open_dims=True)
    assert found.program.sizes is not None, found.plan.notes
    return found


def _reason(program: CompiledProgram, kwargs: dict[str, Any]) -> str | None:
    assert program.program.sizes is not None
    return program.program.sizes.rejection(flatten_inputs((), kwargs)[0])


def _assert_right(program: CompiledProgram, model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Against the model captured for exactly these inputs."""
    assert _reason(program, kwargs) is None
    found = parity.make_case(model, kwargs)
    step = parity.simulate(found, program)
    assert parity.output_error(step, found) < 1e-10
    assert parity.gradient_error(step.grads, found.grads) < 1e-10


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("gpt2", 2),
        *(
            pytest.param(name, tp, marks=pytest.mark.slow)
            for name, tp in (("gpt2", 4), ("llama", 2), ("bert", 2))
        ),
    ],
)
def test_one_program_serves_other_sizes(name: str, tp: int) -> None:
    program = _open(zoo.build(name, dropout=0.1), zoo.inputs(name, *_EXAMPLE), tp=tp)
    for batch, seq in (_EXAMPLE, *_OTHERS):
        model = zoo.build(name, dropout=0.1)
        _assert_right(program, model, zoo.inputs(name, batch, seq, seed=seq))


@pytest.mark.slow
def test_a_model_with_two_stacks() -> None:
    name = "t5"
    program = _open(zoo.build(name, dropout=0.1), zoo.inputs(name, *_EXAMPLE), tp=4)
    for batch, seq in ((3, 17), (2, 16), (5, 7)):
        _assert_right(program, zoo.build(name, dropout=0.1), zoo.inputs(name, batch, seq))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "none", "sequence_parallel": False},
        {"recompute": "attention", "dropout": "stored"},
        {"recompute": "full", "outputs": "replicate"},
    ],
)
def test_every_option(options: dict[str, Any]) -> None:
    program = _open(zoo.build("gpt2", dropout=0.1), zoo.inputs("gpt2", *_EXAMPLE), tp=2, **options)
    kwargs = zoo.inputs("gpt2", 3, 15)
    found = parity.make_case(
        zoo.build("gpt2", dropout=0.1), kwargs, dropout=options.get("dropout", "regenerate")
    )
    assert _reason(program, kwargs) is None
    step = parity.simulate(found, program)
    assert parity.output_error(step, found) < 1e-10
    assert parity.gradient_error(step.grads, found.grads) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_no_size_of_the_example_is_in_the_text(name: str) -> None:
    programs = [
        _open(zoo.build(name), zoo.inputs(name, *sizes), tp=2) for sizes in (_EXAMPLE, (3, 21))
    ]
    assert programs[0].code == programs[1].code
    assert "b*s" in programs[0].code
    # What is reported of a program is reported for the sizes of its example.
    plans = [program.plan for program in programs]
    assert plans[0].activation_peak_bytes < plans[1].activation_peak_bytes
    for plan in plans:
        assert "s" in str(plan.explain(next(iter(programs[0].param_placements))))


def test_given_attention_masks() -> None:
    def padded(batch: int, seq: int) -> dict[str, Any]:
        kwargs = zoo.inputs("llama", batch, seq)
        mask = torch.ones(batch, seq, dtype=torch.int64)
        mask[0, seq // 2 :] = 0
        return {**kwargs, "attention_mask": mask}

    program = _open(zoo.build("llama"), padded(*_EXAMPLE), tp=2)
    for sizes in ((2, 12), (3, 17), (4, 8)):
        _assert_right(program, zoo.build("llama"), padded(*sizes))


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


def _x(batch: int, seq: int) -> Tensor:
    return torch.randn(
        batch, seq, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq)
    )


def test_a_mask_that_is_causal_for_short_sequences_only() -> None:
    program = _open(_windowed(), {"x": _x(2, 6)}, tp=2)
    assert "0.0, True" in program.code  # no mask
    _assert_right(program, _windowed(), {"x": _x(3, 8)})
    assert "attention mask" in str(_reason(program, {"x": _x(2, 9)}))
    longer = _open(_windowed(), {"x": _x(2, 12)}, tp=2)
    _assert_right(longer, _windowed(), {"x": _x(3, 17)})
    _assert_right(longer, _windowed(), {"x": _x(3, 5)})


class Branching(users.Net):
    """Long sequences take another branch."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[1] > 8:
            x = x.flip(1) * 2
        return super().forward(x, *args, **kwargs)


class Recurrent(users.Net):
    """A loop over the sequence."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        steps = [x[:, 0]]
        for index in range(1, x.shape[1]):
            steps.append(torch.tanh(steps[-1] + x[:, index]))
        return super().forward(torch.stack(steps, 1), *args, **kwargs)


def _same_step(module: Any, model: nn.Module, x: Tensor) -> None:
    for each in (module, model):
        each.zero_grad()
        each(x)["loss"].backward()
    torch.testing.assert_close(module(x), model(x), rtol=1e-10, atol=1e-10)
    users.assert_same_gradients(module, model)


def test_twenty_lengths_compile_twice() -> None:
    module, model = users.compiled(), users.net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seq in range(2, 22):
            _same_step(module, model, users.batch(2 + seq % 3, seq))
    assert users.num_compiled(module) == 2


def test_what_runs_under_collectives_is_decided_by_the_example() -> None:
    """What is in memory at once depends on the sizes; no other call has to agree about it."""
    comparisons = []
    for overlap in (True, False):
        kwargs = {"x": users.batch(2, 12)}
        program = _open(users.net(0.1), kwargs, tp=2, recompute="full", overlap=overlap)
        assert (".wait()" in program.code) == overlap
        assert program.program.sizes is not None
        comparisons.append([guard.expr for guard in program.program.sizes.env.guards])
    assert comparisons[0] == comparisons[1]


def test_hooks_of_layers_see_no_sizes() -> None:
    module, _ = _twice(users.Net)
    seen: list[int] = []
    module.blocks[1].register_forward_pre_hook(lambda block, args: seen.append(len(args)))
    for shape in ((2, 4), (3, 5)):
        module(users.batch(*shape))
    assert seen[0] == seen[1]


def test_the_first_size_keeps_its_own_program() -> None:
    module = users.compiled(example_inputs=((users.batch(4, 6),), {}))
    assert module._sp_state.latest.program.sizes is None
    module(users.batch(4, 7))
    assert module._sp_state.latest.program.sizes is not None
    opened = module._sp_state.latest
    module(users.batch(4, 6))
    assert module._sp_state.latest is not opened
    module(users.batch(3, 9))
    assert module._sp_state.latest is opened


def _twice(kind: Callable[[], nn.Module], **options: Any) -> tuple[Any, nn.Module]:
    """The model compiled, and as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = kind().double()
    return sp_compiler.compile(copy.deepcopy(model), **{"tp": 1, **options}), model


@pytest.mark.parametrize(
    ("kind", "required"), [(Branching, r"size1 <= 8"), (Recurrent, r"Eq\(size1, 5\)")]
)
def test_a_model_that_is_specialised_compiles_again(
    kind: Callable[[], nn.Module], required: str
) -> None:
    module, model = _twice(kind)
    for shape in ((2, 4), (2, 5)):
        _same_step(module, model, users.batch(*shape))
    match = rf"3 programs now .* specialised, .*requires {required} \(.*shapes.py:\d+\)"
    with pytest.warns(UserWarning, match=match):
        _same_step(module, model, users.batch(2, 10))
    for shape in ((2, 10), (2, 5), (2, 4)):
        _same_step(module, model, users.batch(*shape))
    assert users.num_compiled(module) == 3


class Sized(users.Net):
    """Sizes as numbers: in products, quotients and parts."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch, seq, _ = x.shape
        x = x / seq + x.sum(1, keepdim=True) * (batch + 1) + (seq // 2) * x.flip(1) - batch
        return super().forward(x[:, : seq // 2 + 1], *args, **kwargs)


def test_sizes_in_arithmetic() -> None:
    module, model = _twice(Sized)
    for shape in ((2, 4), (3, 7), (2, 8), (5, 5)):
        _same_step(module, model, users.batch(*shape))
    assert users.num_compiled(module) == 2


class Returning(users.Net):
    """The length is an output."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return {**super().forward(x, *args, **kwargs), "length": x.shape[1]}


def test_what_cannot_stay_open_is_compiled_for_each_size_with_one_warning() -> None:
    module, model = _twice(Returning)
    module(users.batch(2, 4))
    with pytest.warns(UserWarning, match="left open: the model returns a size as a number"):
        assert module(users.batch(2, 5))["length"] == 5
    _same_step(module, model, users.batch(3, 6))
    assert users.num_compiled(module) == 3


def test_a_memory_budget_is_kept_for_each_size() -> None:
    module, model = _twice(users.Net, recompute="auto", memory_budget="1MiB")
    for shape in ((2, 4), (2, 5), (3, 6)):
        _same_step(module, model, users.batch(*shape))
        assert module._sp_state.latest.program.sizes is None
    assert users.num_compiled(module) == 3


def test_a_bug_is_no_reason_to_fix_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("a bug")

    module, _ = _twice(users.Net)
    module(users.batch(2, 4))
    monkeypatch.setattr("sp_compiler.compiler.outline", broken)
    with pytest.raises(KeyError, match="a bug"):
        module(users.batch(2, 5))


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


def test_a_model_that_cannot_help_it_is_compiled_for_fixed_sizes_in_the_end() -> None:
    cache = ProgramCache[int]()
    keys = [call_key((), (), [users.batch(2, seq)], None) for seq in range(2, 9)]
    assert not cache.opens(keys[0], [])
    cache.put(keys[0], 0)
    assert cache.opens(keys[1], [])
    for number in range(1, 5):
        cache.put(keys[number], number, _Never())  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match=f"{number + 2} programs now .* never"):
            assert cache.opens(keys[number + 1], []) == (number < 4)


class _Never:
    """Open sizes that fit no other call."""

    def rejection(self, leaves: Any) -> str:
        return "never"


def test_a_size_of_one_is_a_program_of_its_own() -> None:
    module, model = users.compiled(), users.net()
    for shape in ((2, 4), (2, 5), (3, 7)):
        _same_step(module, model, users.batch(*shape))
    opened = module._sp_state.latest
    for shape in ((1, 5), (1, 9), (1, 7)):
        _same_step(module, model, users.batch(*shape))
    assert users.num_compiled(module) == 4
    sizes, leaves = opened.program.sizes, [users.batch(1, 7), None]
    assert sizes.rejection(leaves[: len(sizes.fixed)]) == "size0 is 1, not in 2..int_oo"


def test_the_graphs_that_were_partitioned_run_for_other_sizes() -> None:
    program = _open(zoo.build("gpt2", dropout=0.1), zoo.inputs("gpt2", *_EXAMPLE), tp=2)
    parts = {name: PartitionedCode(region.partitioned) for name, region in program.regions.items()}
    backwards = {
        name: LossBackward(loss.output, parts[name].loss_backward)
        for name, loss in program.loss_backwards.items()
    }
    codes: dict[str, RegionCode] = {**parts}
    interpreted = dataclasses.replace(program, codes=codes, loss_backwards=backwards)
    _assert_right(interpreted, zoo.build("gpt2", dropout=0.1), zoo.inputs("gpt2", 3, 15))


class DataDependent(users.Net):
    """What it does with an open size nobody can say."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = torch.tensor([float(size) for size in map(int, x.shape[:2])], dtype=x.dtype)
        return super().forward(x * sizes.sum(), *args, **kwargs)


def test_sizes_that_python_takes_as_numbers_stay_right() -> None:
    module, model = _twice(DataDependent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in ((2, 4), (2, 5), (3, 5), (2, 4)):
            _same_step(module, model, users.batch(*shape))


def _lengths_on_ranks() -> dict[str, Any]:
    module, model = users.compiled(tp=2), users.net()
    for seq in (4, 5, 8, 3, 7, 4):
        loss = module(users.batch(3, seq))["loss"]
        loss.backward()
        model(users.batch(3, seq))["loss"].backward()
    errors = [
        float((mine.grad.full_tensor() - true.grad).abs().max() / true.grad.abs().max())
        for mine, true in zip(module.parameters(), model.parameters(), strict=True)
    ]
    return {"programs": users.num_compiled(module), "error": max(errors), "code": module.code}


@pytest.mark.slow
def test_ranks_of_a_group() -> None:
    results = run_on_ranks(2, _lengths_on_ranks)
    assert results[0]["code"] == results[1]["code"]
    for result in results:
        assert result["programs"] == 2
        assert result["error"] < 1e-10


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


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_as_many_tokens_in_other_batches(sequence_parallel: bool) -> None:
    """Segments of rows are of the example's batch, whatever their sum is."""
    torch.manual_seed(0)
    model = _Rearranged().double()
    program = _open(model, _rearranged(4, 16), tp=2, sequence_parallel=sequence_parallel)
    for batch, seq in ((4, 16), (16, 4), (8, 8), (2, 32), (4, 12), (5, 7)):
        kwargs = _rearranged(batch, seq)
        if _reason(program, kwargs) is None:
            _assert_right(program, model, kwargs)


class _Caching(nn.Module):
    """Keeps a table by length, which a symbolic length cannot be a key of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.cos(torch.arange(length, dtype=x.dtype))[:, None]
        return (self.linear(x) * self.tables[length]).square().mean()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_export_cannot_leave_open_is_compiled_size_by_size() -> None:
    torch.manual_seed(0)
    model = _Caching().double()
    module = sp_compiler.compile(copy.deepcopy(model), tp=1)
    for length in (8, 12, 6, 12):
        x = torch.randn(3, length, 8, dtype=torch.float64)
        torch.testing.assert_close(module(x), model(x), rtol=1e-12, atol=1e-12)
        assert not hasattr(x, "_dynamo_weak_dynamic_indices"), "a mark on the caller's tensor"


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


def test_products_by_einsum() -> None:
    torch.manual_seed(0)
    model = _ByEinsum().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(4)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seq)
        return {"x": torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64)}

    program = _open(model, inputs(*_EXAMPLE), tp=2)
    whole = [name for name, place in program.param_placements.items() if not place.is_sharded]
    assert whole == ["experts.router"]
    for batch, seq in (_EXAMPLE, *_OTHERS):
        _assert_right(program, model, inputs(batch, seq))
