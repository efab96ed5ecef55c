"""Simulated ranks: layouts, collectives, and a whole program against the model it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from sp_compiler.base.errors import ArgumentError, RankMismatchError
from sp_compiler.base.placement import I, P, Placement, R, S
from sp_compiler.verification.simulate import gather_check, scatter, simulate_step, simulated_ranks
from tests.models.handmade import Model, handmade

LAYOUTS = [I, R, P, S(0), S(1), S(1, (8, 4)), S(1, (4, 4, 4))]
PADDED = [S(0, (5,)), S(1, (7,)), S(1, (1,))]


_WHOLE = torch.arange(96, dtype=torch.float64).view(8, 12)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placement", LAYOUTS, ids=str)
def test_scatter_then_gather_gives_the_whole(placement: Placement, world_size: int) -> None:
    with simulated_ranks(world_size):
        assert torch.equal(gather_check(scatter(_WHOLE, placement, world_size), placement), _WHOLE)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("placement", [*LAYOUTS[3:], *PADDED], ids=str)
def test_communicator_works_on_simulated_ranks(placement: Placement, world_size: int) -> None:
    text, whole = str(placement), _WHOLE
    if placement in PADDED:
        whole = whole.narrow(placement.dim, 0, placement.segments[0])
    with simulated_ranks(world_size) as tp:
        parts = scatter(whole, placement, world_size)
        sums = scatter(whole, P, world_size)
        assert torch.equal(gather_check(tp.all_gather(parts, text, "R"), R), whole)
        assert torch.equal(gather_check(tp.reduce_scatter(sums, "P", text), placement), whole)
        assert torch.equal(gather_check(tp.all_reduce(sums, "P", "I"), I), whole)
        assert torch.equal(
            gather_check(tp.shard(scatter(whole, I, world_size), "I", text), placement), whole
        )
        assert torch.equal(gather_check(tp.zero_pad_to_partial(parts, text, "P"), P), whole)


def test_replicated_values_that_differ_are_refused() -> None:
    with simulated_ranks(2) as tp, pytest.raises(RankMismatchError, match="rank 0 and rank 1"):
        gather_check(scatter(_WHOLE, S(0), 2), I)
    for dtype in (torch.bool, torch.uint8):  # 1 - 0 and 0 - 1 in their own type: none, and 255
        parts = scatter(torch.tensor([0, 1], dtype=dtype), S(0), 2)
        with simulated_ranks(2), pytest.raises(RankMismatchError, match="by up to 1;"):
            gather_check(parts, I)
    with simulated_ranks(2) as tp, pytest.raises(RankMismatchError, match="same on every rank"):
        torch.as_tensor(tp.rank).item()


def test_scatter_refuses_what_is_already_simulated() -> None:
    with simulated_ranks(2), pytest.raises(ArgumentError, match="make full tensors before"):
        scatter(torch.randn(4), I, 2)


def test_nothing_of_torch_distributed_is_touched() -> None:
    assert not dist.is_initialized()
    with simulated_ranks(2) as tp:
        tp.all_reduce(scatter(_WHOLE, I, 2), "P", "I")
        assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_whole_program_equals_the_model(world_size: int) -> None:
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    expected = model(x)
    expected["loss"].backward()
    step = simulate_step(
        handmade(world_size), dict(model.named_parameters()), {"steps": torch.tensor(6)}, [x]
    )
    torch.testing.assert_close(step.outputs[0], expected["loss"].detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(step.outputs[1], expected["last"].detach(), rtol=1e-13, atol=1e-15)
    assert step.mutated_buffers["steps"].item() == 7
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.grads[name], parameter.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(step.input_grads[0], x.grad, rtol=1e-12, atol=1e-15)


def test_given_output_gradients_are_used() -> None:
    model = Model().double()
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(model(x)["last"], x, weight)
    step = simulate_step(
        handmade(2),
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        [x],
        output_grads=[None, weight],
    )
    torch.testing.assert_close(step.input_grads[0], expected, rtol=1e-12, atol=1e-15)


def test_a_dropped_reduction_is_seen() -> None:
    """Without the reduction of ``scale`` the loss is right and the ranks' gradients differ."""
    model = Model().double()
    compiled = handmade(2)
    for region in compiled.program.regions:
        if region.name == "Block":
            region.input_placements = (I, *region.input_placements[1:])
    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(RankMismatchError):
        simulate_step(compiled, dict(model.named_parameters()), dict(model.named_buffers()), [x])


@pytest.mark.parametrize(("dim", "is_sent"), [(0, True), (1, False)])
def test_a_collective_on_its_way_holds_what_it_sends(dim: int, is_sent: bool) -> None:
    """Rows are sent as they are; of columns a copy is, and nothing needs them any more."""
    whole = torch.randn(4, 6, dtype=torch.float64)
    with simulated_ranks(2) as tp:
        x = scatter(whole, P, 2)
        parts = StorageWeakRef(x._local_tensors[1].untyped_storage())
        pending = tp.start_reduce_scatter(x, "P", f"S({dim})")
        del x
        assert parts.expired() != is_sent
        assert torch.equal(gather_check(pending.wait(), S(dim)), whole)
        assert parts.expired()
