"""Modules called with other sizes: one compilation, or one for each where none serves all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._sympy.value_ranges import ValueRanges

import sp_compiler
from sp_compiler.runtime.keys.call_key import call_key
from sp_compiler.runtime.program_cache import ProgramCache
from tests.helpers import users
from tests.helpers.open_sizes import open_program
from tests.helpers.ranks import run_on_ranks


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


@pytest.mark.slow
def test_what_runs_under_collectives_is_decided_by_the_example() -> None:
    """Peak memory depends on the sizes; no other call has to agree about it."""
    comparisons = []
    for overlap in (True, False):
        kwargs = {"x": users.batch(2, 12)}
        program = open_program(users.net(0.1), kwargs, tp=2, recompute="full", overlap=overlap)
        assert (".wait()" in program.code) == overlap
        assert program.program.sizes is not None
        comparisons.append([guard.expr for guard in program.program.sizes.env.guards])
    assert comparisons[0] == comparisons[1]


@pytest.mark.slow
def test_hooks_of_layers_see_no_sizes() -> None:
    module, _ = _twice(users.Net)
    seen: list[int] = []
    module.blocks[1].register_forward_pre_hook(lambda block, args: seen.append(len(args)))
    for shape in ((2, 4), (3, 5)):
        module(users.batch(*shape))
    assert seen[0] == seen[1]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "required"), [(Branching, r"size1 <= 8"), (Recurrent, r"Eq\(size1, 5\)")]
)
def test_a_model_that_is_specialised_compiles_again(
    kind: Callable[[], nn.Module], required: str
) -> None:
    module, model = _twice(kind)
    for shape in ((2, 4), (2, 5)):
        _same_step(module, model, users.batch(*shape))
    match = rf"3 programs now .* specialised, .*requires {required} \(.*test_dynamic_calls.py:\d+\)"
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_model_that_cannot_help_it_is_compiled_for_fixed_sizes_in_the_end() -> None:
    cache = ProgramCache[int]()
    keys = [call_key((), (), (), [users.batch(2, seq)], None) for seq in range(2, 9)]
    assert not cache.opens(keys[0], [])
    cache.put(keys[0], 0)
    assert cache.opens(keys[1], [])
    for number in range(1, 5):
        cache.put(keys[number], number, _Never())  # type: ignore[arg-type]
        assert cache.opens(keys[number + 1], []) == (number < 4)
        with pytest.warns(UserWarning, match=rf"{number + 2} programs now .* \(x \(9,\)\).* never"):
            cache.warn_of_sizes(keys[number + 1], [], "x (9,)")


@pytest.mark.slow
def test_a_call_that_fails_is_not_said_to_be_compiled_again() -> None:
    """Its own error is what the user has to read."""
    module, _ = _twice(Branching)
    for seq in (4, 5):
        module(users.batch(2, seq), torch.zeros(2, seq, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(sp_compiler.CaptureError, match="Mismatching argument"):
            module(users.batch(2, 10), torch.zeros(3, 10, 3))


class _Never:
    """Open sizes that fit no other call."""

    def rejection(self, leaves: Any) -> str:
        return "never"


@pytest.mark.slow
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
    # As a comparison with a constant narrows it, without a guard.
    sizes.env.var_to_range[sizes.open[0].symbol] = ValueRanges(2, 8)
    for size, rejection in ((8, None), (9, "size0 is 9, not in 2..8")):
        leaves = [users.batch(size, 7), None]
        assert sizes.rejection(leaves[: len(sizes.fixed)]) == rejection


class DataDependent(users.Net):
    """An operator whose effect on an open size is unknown."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = torch.tensor([float(size) for size in map(int, x.shape[:2])], dtype=x.dtype)
        return super().forward(x * sizes.sum(), *args, **kwargs)


@pytest.mark.slow
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
        float((actual.grad.full_tensor() - true.grad).abs().max() / true.grad.abs().max())
        for actual, true in zip(module.parameters(), model.parameters(), strict=True)
    ]
    return {"programs": users.num_compiled(module), "error": max(errors), "code": module.code}


@pytest.mark.slow
def test_ranks_of_a_group() -> None:
    results = run_on_ranks(2, _lengths_on_ranks)
    assert results[0]["code"] == results[1]["code"]
    for result in results:
        assert result["programs"] == 2
        assert result["error"] < 1e-10


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_export_cannot_leave_open_is_compiled_size_by_size() -> None:
    torch.manual_seed(0)
    model = _Caching().double()
    module = sp_compiler.compile(copy.deepcopy(model), tp=1)
    for length in (8, 12, 6, 12):
        x = torch.randn(3, length, 8, dtype=torch.float64)
        torch.testing.assert_close(module(x), model(x), rtol=1e-12, atol=1e-12)
        assert not hasattr(x, "_dynamo_weak_dynamic_indices"), "a mark on the caller's tensor"
