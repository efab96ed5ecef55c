"""Functions compiled by Inductor: their numbers, masks above all, and what they do without it."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import codecache, config
from torch._inductor.codecache import FxGraphCachePickler, compiled_fx_graph_hash
from torch._inductor.cpp_builder import _get_ffast_math_flags
from torch._inductor.cpu_vec_isa import VecAVX2, VecISA
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.runtime import triton_compat
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import ValueRanges

from sp_compiler.codegen.backends.inductor import _device_of
from sp_compiler.inductor.fused import Fused, TracingRank, first_line
from sp_compiler.inductor.lowering import _PINNED, _arrangement
from sp_compiler.inductor.shortcuts import (
    equal_bounds_kept,
    header_compiled_once,
    keys_unexplained,
    triton_hashed_where_it_runs,
    types_listed_once,
    vector_units_tried_once,
)
from sp_compiler.ops.communicator import Communicator
from sp_compiler.ops.dropout import dropout, dropout_mask
from sp_compiler.ops.uniform import uniform
from tests.helpers.inductor import fused, needs_compiler, own_cache

pytestmark = needs_compiler

SEEDS = (12345, 0, -1, -(1 << 63), (1 << 63) - 1)
# Of two ranks; and so far behind that offsets exceed 2^32 and 2^40, without such tensors.
RANKS = (0, 1, 1 << 29, 1 << 37)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with own_cache(tmp_path):
        yield tmp_path


def _on_rank(result: Fused, rank: int, *arguments: Any) -> tuple[Any, Any]:
    """Return the compiled result and the function's own, on this rank."""
    tp = Communicator(None, rank, 2)
    return result(tp, *arguments), result._function(tp, *arguments)


def test_masks_are_equal_to_the_bit() -> None:
    """Over seeds and ranks, of a tensor of no plain layout."""
    x = torch.randn(6, 40).t().reshape(40, 2, 3).transpose(0, 1)
    compiled = fused(lambda tp, x, seed: dropout(tp, x, seed, 0.5, 1, 1, 2), [x, torch.tensor(0)])
    # The first call compiles, and runs what was compiled.
    with mock.patch.object(compiled, "_function", None):
        compiled(Communicator(None, 0, 2), x, torch.tensor(0))
    for seed in SEEDS:
        for rank in RANKS:
            got, expected = _on_rank(compiled, rank, x, torch.tensor(seed))
            assert compiled.reason == ""
            assert torch.equal(got, expected)


@pytest.mark.slow
def test_one_compilation_serves_open_sizes() -> None:
    compiled = Fused(
        lambda tp, x, rows, seed: dropout(tp, x.reshape(rows * 4, 8), seed, 0.5, 1, 0, 2)
    )
    mode = FakeTensorMode(shape_env=ShapeEnv())
    batch = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(6, 4, 8), symbolic_context=batch)
    with mode:
        rank = TracingRank(torch.zeros((), dtype=torch.int64), 2)
        compiled(rank, x, x.shape[0], mode.from_tensor(torch.tensor(0)))
    for rows in (6, 3, 10):
        got, expected = _on_rank(compiled, 1, torch.randn(rows, 4, 8), rows, torch.tensor(5))
        assert compiled.reason == ""
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_masks_of_more_sites_and_other_numbers_are_equal_to_the_bit() -> None:
    """Columns of more than 2^32 among them."""
    x = torch.randn(4, 6, 17)

    def function(tp: Communicator, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        return (
            *[dropout(tp, x, seed, 0.5, site, site % 3, 2) for site in (0, 2, 3, 1000)],
            dropout_mask(tp, x, seed, 0.1, 2, -1, 1 << 33),
            uniform(tp, seed, [3, 5], torch.float64, 2, 0, 2),
        )

    compiled = fused(function, [x, torch.tensor(0)])
    for seed in SEEDS:
        for rank in RANKS:
            got, expected = _on_rank(compiled, rank, x, torch.tensor(seed))
            assert [torch.equal(*pair) for pair in zip(got, expected, strict=True)] == [True] * 6


def test_collectives_of_fakes_have_the_shapes_of_real_ones() -> None:
    tp, x = TracingRank(torch.zeros((), dtype=torch.int64), 2), torch.empty(4, 3, 2)
    assert tp.all_gather(x, "S(0)", "R").shape == (8, 3, 2)
    assert tp.reduce_scatter(x, "P", "S(0)").shape == (2, 3, 2)
    assert tp.all_reduce(x, "P", "R").shape == x.shape


def test_a_traced_function_is_not_run_again() -> None:
    """The graph knows the results: their shapes, their layout, and whether they are a tuple."""
    calls = []

    def function(tp: Communicator, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(tp)
        return x.relu().t(), x + tp.rank

    mode = FakeTensorMode()
    with mode:
        x = torch.empty(4, 8)
        rank = TracingRank(torch.zeros((), dtype=torch.int64), 2)
        turned, moved = Fused(function)(rank, x)
        alone = Fused(lambda tp, x: x * 2)(rank, x)
    assert len(calls) == 1
    assert (turned.shape, turned.stride()) == ((8, 4), (1, 8))
    assert moved.shape == alone.shape == (4, 8)
    assert turned.fake_mode is mode


@pytest.mark.parametrize("rows", [[], [3]])
def test_a_function_of_no_tensors(rows: list[int]) -> None:
    """Of sizes, or of nothing but the rank."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    batch = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    sizes = [mode.from_tensor(torch.empty(6), symbolic_context=batch).shape[0] for _ in rows]
    compiled = Fused(lambda tp, n=4: torch.arange(n) + tp.rank * n)
    with mode:
        compiled(TracingRank(torch.zeros((), dtype=torch.int64), 2), *sizes)
    interpreted = mock.patch(
        "sp_compiler.inductor.fused.compile_graph",
        lambda traced: lambda values: traced.module(*values),
    )
    with interpreted:
        compiled.compile()
    got, expected = _on_rank(compiled, 1, *rows)
    assert torch.equal(got, expected)


def test_each_argument_is_read_as_itself() -> None:
    """Even where the fake ones are one tensor."""
    compiled = Fused(lambda tp, x, y: x - 2 * y)
    with FakeTensorMode():
        x = torch.empty(3)
        compiled(TracingRank(torch.zeros((), dtype=torch.int64), 2), x, x)
    assert compiled._traced is not None
    x, y = torch.randn(2, 3)
    assert torch.equal(compiled._traced.module(x, y)[0], x - 2 * y)


def test_a_graph_is_not_written_before_its_text_is_read() -> None:
    recompile = GraphModule.recompile
    count = mock.patch.object(GraphModule, "recompile", autospec=True, side_effect=recompile)
    with count as written:
        traced = fused(lambda tp, x: x.relu(), [torch.ones(4)])._traced
        assert traced is not None
        assert not written.called
        assert "aten.relu" in traced.module.code


def test_inputs_get_the_layout_that_was_compiled_for() -> None:
    """Of dims in another order; a part of a larger tensor and a number stay as they are."""
    traced = torch.empty(2, 5, 3).permute(1, 2, 0)
    arrange = _arrangement(traced)
    assert arrange is not None
    x = torch.randn(5, 3, 2)
    assert arrange(x).stride() == traced.stride()
    assert torch.equal(arrange(x), x)
    contiguous = _arrangement(torch.empty(5, 3, 2))
    assert contiguous is not None
    assert contiguous(x.permute(2, 0, 1)).is_contiguous()
    assert _arrangement(torch.empty(4, 6)[:, :3]) is None
    assert _arrangement(7) is None


@pytest.mark.slow
def test_an_input_may_have_another_layout() -> None:
    """It is copied into that of the trace, and results have theirs."""
    compiled = fused(lambda tp, x: torch.exp(x) * 2 + 1, [torch.randn(4, 8)])
    x = torch.randn(8, 4).t()
    got, _ = _on_rank(compiled, 0, x)
    torch.testing.assert_close(got, torch.exp(x) * 2 + 1)
    assert got.is_contiguous()


def test_every_pinned_setting_exists() -> None:
    """And the flag for overflow reaches the command line."""
    with config.patch(_PINNED):
        assert not config.reorder_for_peak_memory
        assert "fwrapv" in " ".join(_get_ffast_math_flags())


def test_vector_units_are_tried_once_for_a_cache(cache: Path) -> None:
    """Not once in every process; again if one has failed."""
    unit, tries = VecAVX2(), []
    for passes in (False, True, True):
        with mock.patch.object(VecISA, "check_build", return_value=passes) as check:
            with vector_units_tried_once():
                assert unit.check_build("code") is passes
            tries.append(check.called)
            assert VecISA.check_build is check
    assert tries == [True, True, False]
    assert len(list(cache.glob("vector_unit_*"))) == 1


def test_the_header_is_preprocessed_once_for_a_cache(cache: Path) -> None:
    """Again for other flags, and where what was compiled is gone."""
    compiled = cache / "header.h.gch"
    compiled.touch()
    calls = []
    for command in ("g++ -O1", "g++ -O1", "g++ -O3", "g++ -O3"):
        with mock.patch.object(codecache, "_precompile_header", return_value=str(compiled)) as make:
            with header_compiled_once():
                assert codecache._precompile_header("x.h", command) == str(compiled)
            calls.append(make.called)
            assert codecache._precompile_header is make
    compiled.unlink()
    again = mock.patch.object(codecache, "_precompile_header", return_value="other")
    with again, header_compiled_once():
        assert codecache._precompile_header("x.h", "g++ -O1") == "other"
    assert calls == [True, False, True, False]


def test_keys_are_explained_to_a_log_that_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """And equal without."""
    with FakeTensorMode(), mock.patch.object(FxGraphCachePickler, "debug_lines") as explain:
        explain.return_value = ["a line"]
        graph = make_fx(torch.exp)(torch.empty(4))
        keys = []
        for level in (logging.INFO, logging.DEBUG):
            with caplog.at_level(level, "torch._inductor.codecache"), keys_unexplained():
                keys.append(compiled_fx_graph_hash(graph, [torch.empty(4)], {}, []))
        assert [lines for _, lines in keys] == [[], ["a line"]]
        assert keys[0][0] == keys[1][0]


@pytest.mark.parametrize("is_there", [True, False])
def test_triton_is_hashed_where_a_device_runs_it(is_there: bool) -> None:
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=is_there),
        mock.patch.object(triton_compat, "triton_key", return_value="a hash") as key,
    ):
        with triton_hashed_where_it_runs():
            triton_compat.triton_key()
        assert key.called == is_there
        assert triton_compat.triton_key is key


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_without_a_device_a_key_does_not_depend_on_triton() -> None:
    keys = []
    for triton_version in ("one", "other"):
        with (
            mock.patch.object(triton_compat, "triton_key", return_value=triton_version),
            # Behind a cache of its own since torch 2.12.
            mock.patch.object(codecache, "triton_key", create=True, return_value=triton_version),
        ):
            keys.append(codecache.CacheBase.get_system.__wrapped__()["hash"])
    assert keys[0] == keys[1]


def test_types_are_listed_once() -> None:
    """With the same answers, and again for the next function."""
    importlib.import_module("torch._inductor.lowering")  # which says what there is to list
    expected = DtypePropagationOpsHandler().add
    with mock.patch.object(DtypePropagationOpsHandler, "return_dtype") as listed:
        counts = []
        for _ in range(2):
            with types_listed_once():
                first = DtypePropagationOpsHandler().eq
                assert DtypePropagationOpsHandler().eq is first
                assert DtypePropagationOpsHandler().add.keywords == expected.keywords
            counts.append(first)
        assert counts[0] is not counts[1]
        assert first.func is listed
    assert DtypePropagationOpsHandler().eq is not first


def test_equal_bounds_are_kept() -> None:
    """And no others."""
    mine, same, other = ValueRanges(0, 8), ValueRanges(0, 8), ValueRanges(4, 12)
    intersection = ValueRanges.tighten
    ask = mock.patch.object(ValueRanges, "tighten", autospec=True, side_effect=intersection)
    with ask as asked, equal_bounds_kept():
        assert mine.tighten(same) is mine
        assert not asked.called
        assert mine.tighten(other) == ValueRanges(4, 8)
        assert asked.called


@pytest.mark.slow
def test_an_equal_graph_is_loaded_from_the_cache() -> None:
    """As the next run and the other ranks do; the rank is no part of it."""
    x = torch.randn(4, 8)
    for hits in range(2):
        counters.clear()
        compiled = fused(lambda tp, x: tp.shard(x, "R", "S(0)") * 2 + 1, [x])
        for rank in range(2):
            got, expected = _on_rank(compiled, rank, x)
            torch.testing.assert_close(got, expected)
        assert counters["inductor"]["fxgraph_cache_hit"] == hits


def test_without_a_compiler_the_text_runs() -> None:
    x = torch.randn(4, 8)
    compiled = fused(lambda tp, x: torch.exp(x) * 2 + 1, [x])
    said = "runs uncompiled because Inductor failed"
    missing = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.warns(UserWarning, match=said):
        got, expected = _on_rank(compiled, 0, x)
    assert compiled.reason
    assert torch.equal(got, expected)


def test_what_cannot_be_traced_runs_as_written() -> None:
    compiled = Fused(lambda tp, x: torch.exp(x) * int(x.sum() > 0))
    tp = TracingRank(torch.tensor(0), 2)
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        compiled(tp, mode.from_tensor(torch.ones(4)))
    assert "_local_scalar_dense" in compiled.reason
    assert not compiled.is_traced
    got, expected = _on_rank(compiled, 0, torch.ones(4))
    assert torch.equal(got, expected)


@pytest.mark.slow
def test_a_maximum_pool_in_a_new_process() -> None:
    """Where nothing has imported the part of Inductor that its decomposition reads."""
    function = "lambda tp, x: torch.nn.functional.max_pool2d(x, 2).relu()"
    traced = f"fused({function}, [torch.ones(1, 1, 4, 4)])"
    code = f"import torch\nfrom tests.helpers.inductor import fused\nprint({traced}.reason)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "\n"


def test_reasons_are_the_same_on_all_ranks() -> None:
    assert (
        first_line(ValueError(f"{first_line} is none\nand more")) == "<function first_line> is none"
    )
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("rank", [1, torch.tensor(1)])
def test_the_rank_is_a_number_on_the_device(rank: Any) -> None:
    """Of one on the CPU, Inductor's code for a GPU asks the host, which waits if it is not there.

    A number on the CPU may be among the inputs, and the first of them.
    """
    inputs = [torch.tensor(0.5), torch.empty(2, device="meta"), 3]
    assert _device_of(inputs).type == "meta"
    assert _device_of([torch.tensor(0.5), 3]).type == _device_of([]).type == "cpu"
    given = Fused(torch.relu)._rank_beside(inputs, rank, torch.device("meta"))
    assert (given.device.type, given.dtype, given.shape) == ("meta", torch.int64, ())
