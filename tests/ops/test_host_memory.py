"""Saved tensors in the memory of the host: gradients, bytes, times, and what cannot go."""

from __future__ import annotations

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory_check import measure
from sp_compiler.api import compile as compile_model
from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.gpu import host_memory as ops_host_memory
from sp_compiler.ops.gpu.host_memory import HostTrip
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from sp_compiler.verification.variants import variants_by_pass
from tests.helpers import host_memory, parity
from tests.helpers.host_memory import OPTIONS


@functools.cache
def _case() -> parity.Case:
    return parity.make_case(host_memory.model(), host_memory.inputs())


_least = functools.cache(host_memory.least_bytes)


def _offloaded(tp: int, more: float = 1.0) -> CompiledProgram:
    budget = int(more * _least(tp, True))
    return parity.compiled_in_turn(_case(), tp=tp, memory_budget=budget, **OPTIONS)


@pytest.mark.parametrize("more", [1.0, 1.3])
def test_a_step_holds_what_was_planned(more: float) -> None:
    """To the byte, and less than the least that is possible on the device alone."""
    program = _offloaded(1, more)
    memory = step_memory(program)
    assert memory.host_bytes > 0
    assert measure(_case(), program) == (memory.kept_bytes, memory.peak_bytes)
    if more == 1.0:
        assert memory.peak_bytes == _least(1, True) < _least(1, False)


def test_kernels_of_the_tensors_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another one, which may be the current device, do not use their memory."""
    waits: list[str] = []
    event = SimpleNamespace(wait=lambda stream=None: waits.append(stream))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(
        ops_host_memory, "_stream_for_copies", lambda device: contextlib.nullcontext(stream)
    )
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    for is_fetched in (True, False):
        copies = ops_host_memory._Copies([torch.ones(2)], torch.device("meta"))
        if is_fetched:
            copies.wait()
        del copies
    assert waits == ["of meta", "of meta"]


def test_gradients_are_equal_to_the_bit() -> None:
    """Under simulated ranks, against the same model that keeps everything."""
    found = _case()
    kept = parity.compiled_in_turn(found, tp=2, recompute="none", hardware=host_memory.HARDWARE)
    expected = parity.simulate(found, kept).grads
    assert step_memory(_offloaded(2)).host_bytes > 0
    actual = parity.simulate(found, _offloaded(2)).grads
    parity.assert_equal_to_the_bit(actual, expected)


def _compiled() -> tuple[Any, dict[str, Tensor]]:
    inputs = host_memory.inputs()
    options = {**OPTIONS, "memory_budget": _least(1, True)}
    compiled = compile_model(host_memory.model(), tp=1, example_inputs=((), inputs), **options)
    assert compiled.plan.host_bytes > 0
    return compiled, inputs


@pytest.mark.slow
def test_backward_may_run_twice_and_after_another_forward() -> None:
    compiled, inputs = _compiled()
    model = host_memory.model()
    model(**inputs).backward()
    first = compiled(**inputs)
    compiled(x=2 * inputs["x"])  # another forward in between
    first.backward(retain_graph=True)
    first.backward()
    for (name, parameter), original in zip(
        compiled.named_parameters(), model.parameters(), strict=True
    ):
        assert original.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * original.grad, msg=name)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), first)


def test_a_tensor_that_is_changed_while_it_leaves_raises() -> None:
    compiled, inputs = _compiled()

    taken: list[Tensor] = []
    first = compiled.layers[2].register_forward_pre_hook(lambda _, args: taken.append(args[-1]))

    def change(module: nn.Module, args: tuple[Any, ...]) -> None:
        taken[0].detach().mul_(2)

    # Behind the layer that sends it, before the next one has run.
    second = compiled.layers[3].register_forward_pre_hook(change)
    with pytest.raises(UnsupportedError, match="changed in place while it was copied"):
        compiled(**inputs)
    first.remove()
    second.remove()
    compiled(**inputs).backward()


def test_copies_of_broadcast_and_spaced_tensors_keep_their_strides() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    sources = [
        value[:1].expand(5, 3, 4),
        value[:, ::2, 1:],
        value.transpose(0, 2),
        value[:0],
        value[1, 1, 1],
        torch.complex(value, value).conj(),
    ]
    trip = HostTrip(tuple(range(len(sources))), None)
    saved = trip.leave(sources)
    trip.left()
    fetched = trip.fetch(saved)
    for source, *copies in zip(sources, saved, fetched, strict=True):
        for copy in copies:
            assert copy.stride() == source.stride()
            assert torch.equal(copy, source)


def test_what_an_earlier_backward_fetched_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = torch.arange(3.0)
    first = HostTrip((0,), None)
    last = HostTrip((), first)
    saved = first.leave([value])
    ahead = last.leave([])
    first.left()
    copies: list[Any] = []
    make = ops_host_memory._Copies

    def recorded(*args: Any) -> Any:
        copies.append(make(*args))
        return copies[-1]

    monkeypatch.setattr(ops_host_memory, "_Copies", recorded)
    last.fetch(ahead)  # of a backward that ends here, with retain_graph
    last.fetch(ahead)
    (copy,) = first.fetch(saved)
    assert len(copies) == 1
    assert torch.equal(copy, value)


def test_variants_that_verify_runs_save_other_values() -> None:
    """Those from before the partition, which says what goes to the host, keep all of it."""
    program = _offloaded(2)
    expected = parity.simulate(_case(), program).grads
    variants = variants_by_pass(program, joint=True)
    assert {"shard", "joint", "tag", "partition", "codegen"} <= variants.keys()
    for name, variant in variants.items():
        grads = parity.simulate(_case(), variant).grads
        torch.testing.assert_close(grads, expected, msg=name)


def test_plan_shows_tensors_on_the_host_and_its_link() -> None:
    options = CompileOptions(tp=1, memory_budget=_least(1, True), **OPTIONS)
    found = make_plan(_offloaded(1), options)
    (block,) = [block for block in found.blocks if block.sent and block.num_calls > 1][:1]
    assert {tensor.policy for tensor in block.sent} == {"offload"}
    assert "on the host" in str(found)
    copies = [(run, span) for run, span in found.schedule.spans() if span.stream == "host"]
    there = [span for _, span in copies if span.operator == "to host"]
    back = [span for _, span in copies if span.operator == "from host"]
    assert len(there) == len(back) > 0
    # One after another on the link.
    times = [(span.begin_us, span.end_us) for _, span in copies]
    assert times == sorted(times)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert found.step_us == pytest.approx(found.work.step_us + found.schedule.host_wait_us)
    assert found.schedule.step_us == pytest.approx(found.step_us)


def test_nothing_is_sent_without_need() -> None:
    found = parity.compiled_in_turn(_case(), tp=1, memory_budget="1GiB", **OPTIONS)
    assert step_memory(found).host_bytes == 0


def test_bad_values() -> None:
    x = ((), host_memory.inputs())
    with pytest.raises(ArgumentError, match=r'offload=True with recompute=.*"auto"'):
        plan(host_memory.model(), x, tp=1, offload=True)
    with pytest.raises(ArgumentError, match="offload=1"):
        plan(host_memory.model(), x, tp=1, offload=1)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="offload=True: pipelines"):
        CompileOptions(memory_budget="1GiB", tables_apart=True, **OPTIONS)
