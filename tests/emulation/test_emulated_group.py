"""The emulated group: transfers by hand, numbers of a rank among equals, compiled steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from benchmarks.models import GPTConfig, PlainGPT
from examples.exposed_communication import measured
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.emulation.clock import VirtualClock
from sp_compiler.ops.communicator import FunctionalCollectives


def _collectives() -> FunctionalCollectives:
    world = dist.group.WORLD
    assert world is not None
    return FunctionalCollectives(world.group_name)


def test_transfers_take_turns_and_early_waits_move_the_clock() -> None:
    with sp_compiler.emulated_group(4, gb_per_s=1.0, latency_us=5.0) as clock:
        group, part = _collectives(), torch.ones(250)
        clock.reset()
        # A gather of 4000 bytes to all: 3000 cross the link at 1000 bytes a us; the
        # all-reduce of 1000 bytes behind it sends 1500.
        first, second = group.all_gather(part, 4), group.all_reduce(part, "sum")
        clock.advance(6.0)
        assert first().shape == (1000,)
        assert clock.now_us() == pytest.approx(8.0)
        clock.advance(100.0)
        second()
        assert clock.now_us() == pytest.approx(108.0)
        assert clock.busy_us == {"forward": pytest.approx(8.0 + 6.5), "backward": 0.0}
        assert clock.exposed_us["forward"] == pytest.approx(2.0)
        assert clock.computed_us["forward"] == pytest.approx(106.0)
    assert not dist.is_initialized()


def test_numbers_are_those_of_a_rank_among_equals() -> None:
    with sp_compiler.emulated_group(2):
        group, x = _collectives(), torch.arange(4.0).view(2, 2)
        assert torch.equal(group.all_gather(x, 2)(), torch.cat([x, x]))
        assert torch.equal(group.reduce_scatter(x, 2)(), 2 * x[:1])
        assert torch.equal(group.all_reduce(x, "sum")(), 2 * x)
        assert torch.equal(group.all_reduce(x, "max")(), x)
        parts = [torch.empty(2, 2), torch.empty(2, 2)]
        dist.all_gather(parts, x)
        assert all(torch.equal(part, x) for part in parts)
        # As libraries call them.
        full, own = torch.empty(4, 2), torch.empty(1, 2)
        dist.all_gather_into_tensor(full, x)
        dist.reduce_scatter_tensor(own, x)
        assert torch.equal(full, torch.cat([x, x]))
        assert torch.equal(own, 2 * x[:1])
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        assert torch.equal(own, 2 * x[:1])
        with pytest.raises(UnsupportedError, match="a reduction by PRODUCT: only SUM"):
            dist.all_reduce(own, op=dist.ReduceOp.PRODUCT)


def test_a_reset_forgets_what_is_on_its_way() -> None:
    with sp_compiler.emulated_group(2) as clock:
        arrive = _collectives().all_reduce(torch.ones(1000), "sum")
        clock.reset()
        arrive()
        assert clock.now_us() == 0.0
        dist.destroy_process_group()  # as a script does at its end


def test_groups_within_the_group_share_its_link() -> None:
    with sp_compiler.emulated_group(4, gb_per_s=1.0, latency_us=0.0) as clock:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        x = torch.ones(500)
        clock.reset()
        works = [dist.all_reduce(x, group=mesh.get_group(axis), async_op=True) for axis in (0, 1)]
        for work in works:
            assert work is not None
            work.wait()
        assert torch.equal(x, torch.full_like(x, 4.0))
        # Each sends 2000 bytes once, at 1000 bytes a us, one behind the other.
        assert sum(clock.busy_us.values()) == pytest.approx(4.0)
        assert clock.now_us() == pytest.approx(4.0, abs=0.1)


def test_operators_take_their_time_on_the_device() -> None:
    link = sp_compiler.Link(0.0, 1.0)
    rates = {"float32": 2.0, "bfloat16": 4.0}
    links = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), link)
    device = sp_compiler.Hardware("slow", rates, rates, 1.0, links, link, link)
    linear, x = nn.Linear(64, 64, bias=False), torch.ones(64, 64)
    with sp_compiler.emulated_group(2, hardware=device) as clock:
        clock.reset()
        # Bound by memory: two matrices of 16 KiB read and one written, at 1000 bytes a us.
        (linear(x).view(-1) * 1).sum().backward()
        product_us, value_us = 3 * 16.384, 16.384
        assert clock.computed_us["forward"] == pytest.approx(product_us + 3 * value_us, rel=1e-3)
        assert clock.computed_us["backward"] >= product_us


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="world_size=1: expected an int of at least 2"):
        sp_compiler.emulated_group(1).__enter__()
    with pytest.raises(ArgumentError, match="compute='real'"):
        sp_compiler.emulated_group(2, compute="real").__enter__()  # type: ignore[arg-type]
    with (
        sp_compiler.emulated_group(2),
        pytest.raises(ArgumentError, match="there is a default process group"),
    ):
        sp_compiler.emulated_group(2).__enter__()


def _config(hidden_size: int) -> GPTConfig:
    # The head is a small part of all layers, as in a model: it is estimated as one kernel, and is
    # several.
    return GPTConfig(
        vocab_size=2 * hidden_size, num_positions=64, hidden_size=hidden_size, num_layers=2,
        num_heads=4, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def _assert_as_planned(clock: VirtualClock, plan: sp_compiler.Plan) -> None:
    """The emulated step is the plan's, within what the plan leaves out (sums of gradients)."""
    assert plan.schedule.step_us == pytest.approx(plan.step_us)
    assert clock.now_us() == pytest.approx(plan.step_us, rel=0.05)
    assert sum(clock.busy_us.values()) == pytest.approx(plan.work.communication_us, rel=1e-6)
    hidden_us = plan.work.communication_us - sum(plan.schedule.exposed_us.values())
    assert hidden_us == pytest.approx(plan.work.hidden_us)
    for phase, exposed_us in plan.schedule.exposed_us.items():
        # Of the step: what is hidden all but fully leaves a remainder of any relative error.
        assert clock.exposed_us[phase] == pytest.approx(exposed_us, abs=0.02 * plan.step_us)


def test_a_compiled_step_takes_its_planned_time() -> None:
    size = _config(64)
    ids = torch.randint(size.vocab_size, (2, 32))
    with sp_compiler.emulated_group(2, gb_per_s=40.0, latency_us=1.0) as clock:
        module = sp_compiler.compile(
            PlainGPT(size), tp=2, hardware=clock.hardware,
            example_inputs=((ids,), {"labels": ids}),
        )  # fmt: skip
        times = []
        for _ in range(2):
            module.zero_grad()
            clock.reset()
            module(ids, labels=ids)[0].backward()
            times.append((clock.now_us(), dict(clock.exposed_us)))
        assert times[0] == times[1], "the same in every run"
        _assert_as_planned(clock, module.plan)


@pytest.mark.slow
@pytest.mark.parametrize("gb_per_s", [1000.0, 60.0])
def test_every_policy_takes_its_planned_time(gb_per_s: float) -> None:
    size = _config(128)
    ids = torch.randint(size.vocab_size, (2, 64))
    for policy in ("none", "selective", "full"):
        inputs = ((ids,), {"labels": ids})
        clock, plan = measured(PlainGPT(size), inputs, 2, policy, gb_per_s, 0.1)
        _assert_as_planned(clock, plan)


@pytest.mark.slow
def test_half_batches_expose_at_most_half() -> None:
    """A link on which communication is 40 % of the step."""
    size = replace(_config(128), num_layers=4)
    ids = torch.randint(size.vocab_size, (4, 64))
    exposed_us = []
    for halves in (False, True):
        with sp_compiler.emulated_group(2, gb_per_s=150.0, latency_us=0.0) as clock:
            module = sp_compiler.compile(
                PlainGPT(size), tp=2, hardware=clock.hardware, half_batches=halves,
                example_inputs=((ids,), {"labels": ids}),
            )  # fmt: skip
            clock.reset()
            module(ids, labels=ids)[0].backward()
            _assert_as_planned(clock, module.plan)
            exposed_us.append(sum(clock.exposed_us.values()))
    assert exposed_us[1] <= exposed_us[0] / 2
