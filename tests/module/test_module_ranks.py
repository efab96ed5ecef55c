"""The compiled module on two gloo ranks, with a handmade program behind it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from sp_compiler.base.errors import (
    ArgumentError,
    RankMismatchError,
    UnsupportedError,
)
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.runtime.group import tensor_parallel_group
from tests.helpers.handmade_module import (
    Builder,
    compiled_handmade,
    expected_training,
    full,
    handmade_input,
    handmade_model,
    same_training,
    train,
)
from tests.helpers.rehearsal import run_rehearsed
from tests.models.handmade import Model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _many_things() -> dict[str, Any]:
    """All that is cheap to do in one pair of processes; each entry is checked by one test below."""
    result: dict[str, Any] = {"train": train(2), "foreach": train(2, foreach=True)}
    for check in (
        _parameters,
        _accumulation,
        _hooks,
        _state,
        _copies,
        _scaler,
        _mismatch,
        _inplace,
        _frozen,
        _frozen_since,
        _meta,
        _dtype,
        _rows,
        _shared,
    ):
        result[check.__name__.lstrip("_")] = check()
    return result


def _shared() -> Any:
    model = handmade_model()
    name, parameter = next(iter(model.named_parameters()))
    model.register_buffer("view", parameter.detach()[:1])
    try:
        DistributedModule(model, tensor_parallel_group(2), Builder(2))
    except ArgumentError as error:
        return str(error), name, parameter.untyped_storage().nbytes() > 0
    return None


def _parameters() -> Any:
    module, builder = compiled_handmade(2)
    before = dict(module.named_parameters())
    kinds = {type(p._local_tensor) for p in before.values()}
    replicated = all(p.placements == (Replicate(),) for p in before.values())
    module(handmade_input())
    after = dict(module.named_parameters())
    return {
        "kinds": kinds == {Tensor},
        "replicated": replicated,
        "same objects": all(before[name] is after[name] for name in before),
        "placements": {name: str(p.placements[0]) for name, p in after.items()},
        "local": tuple(after["blocks.1.up.weight"].to_local().shape),
        "shape": tuple(after["blocks.1.up.weight"].shape),
        "seen": builder.seen,
    }


def _accumulation() -> Any:
    """Gradients of two microbatches, the first under no_sync, against the sum."""
    grads = {}
    for deferred in (False, True):
        module, _ = compiled_handmade(2)
        if deferred:
            with module.no_sync():
                module(handmade_input())["loss"].backward()
            pending = module.blocks[0].scale.grad is None
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with pytest.raises(UnsupportedError, match="no_sync"):
                optimizer.step()
        else:
            module(handmade_input())["loss"].backward()
        module(2 * handmade_input())["loss"].backward()
        grads[deferred] = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    torch.testing.assert_close(grads[True], grads[False], rtol=1e-12, atol=1e-15)
    return pending


def _hooks() -> Any:
    module, _ = compiled_handmade(2)
    events: list[str] = []
    module.register_forward_hook(lambda m, args, out: events.append("root"))
    module.blocks[1].register_forward_hook(
        lambda m, args, out: events.append(str(tuple(out.shape)))
    )
    module.blocks[0].scale.register_hook(lambda grad: events.append("grad"))
    module.blocks[0].up.weight.register_post_accumulate_grad_hook(
        lambda parameter: events.append(f"post {tuple(parameter.grad.to_local().shape)}")
    )
    module(handmade_input())["loss"].backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up"):
        module.blocks[0].up.register_forward_hook(lambda *args: None)
    late, _ = compiled_handmade(2)
    late.blocks[0].up.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up"):
        late(handmade_input())
    return events


def _state() -> Any:
    module, _ = compiled_handmade(2)
    module(handmade_input())
    whole = {name: value.clone() for name, value in handmade_model().state_dict().items()}
    changed = {name: value + 1 for name, value in whole.items()}
    module.load_state_dict(changed)
    from_plain = {name: full(v).clone() for name, v in module.state_dict().items()}
    other, _ = compiled_handmade(2)
    other.load_state_dict(module.state_dict())
    from_distributed = {name: full(v).clone() for name, v in other.state_dict().items()}
    torch.testing.assert_close(from_plain, changed, rtol=0, atol=0)
    torch.testing.assert_close(from_distributed, changed, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**changed, "blocks.0.scale": torch.zeros(5)})
    return True


def _copies() -> Any:
    module, builder = compiled_handmade(2)
    loss = module(handmade_input())["loss"].item()
    twin = copy.deepcopy(module)
    twin_loss = twin(handmade_input())["loss"].item()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin(handmade_input())["loss"].backward()
    return {
        "losses": (loss, twin_loss, module(handmade_input())["loss"].item()),
        "compiled": len(builder.seen),
        "parameters": all(isinstance(p, nn.Parameter) for p in twin.parameters()),
        "grads": all(p.grad is None for p in module.parameters()),
        "optimizer": len(torch.optim.AdamW(twin.parameters()).param_groups[0]["params"]),
    }


def _scaler() -> Any:
    module, _ = compiled_handmade(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(module(handmade_input())["loss"]).backward()
    scaler.unscale_(optimizer)
    expected = handmade_model()
    expected(handmade_input())["loss"].backward()
    close = all(
        torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-10)
        for p, q in zip(module.parameters(), expected.parameters(), strict=True)
    )
    scaler.step(optimizer)
    scaler.update()
    # An overflow that only rank 0 sees must stop the step on both ranks.
    before = module.blocks[0].up.weight.full_tensor().clone()
    scaler.scale(module(handmade_input())["loss"]).backward()
    if dist.get_rank() == 0:
        module.blocks[0].up.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return {
        "close": close,
        "skipped": torch.equal(before, module.blocks[0].up.weight.full_tensor()),
        "scale": scaler.get_scale(),
    }


def _mismatch() -> Any:
    module, _ = compiled_handmade(2)
    with pytest.raises(RankMismatchError, match="same inputs") as caught:
        module(handmade_input()[: 4 + 2 * dist.get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SP_COMPILER_CHECK", "1")
        good, _ = compiled_handmade(2)
        good(handmade_input())
        with pytest.raises(RankMismatchError, match="input x differs"):
            good(handmade_input() + dist.get_rank())
        unequal = handmade_model()
        nn.init.constant_(unequal.blocks[1].down.weight, dist.get_rank())
        bad = DistributedModule(unequal, tensor_parallel_group(2), Builder(2))
        with pytest.raises(RankMismatchError, match=r"blocks\.1\.down\.weight"):
            bad(handmade_input())
    return "(4, 4)" in str(caught.value) and "(6, 4)" in str(caught.value)


def _inplace() -> Any:
    module, _ = compiled_handmade(2)
    loss = module(handmade_input())["loss"]
    with torch.no_grad():
        module.blocks[0].scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


def _frozen_since() -> Any:
    """What waits for parameters that are frozen before the last microbatch is reduced, too, into
    the tensor that ``grad`` is."""
    module, expected = compiled_handmade(2)[0], handmade_model()
    for one in (module, expected):
        one(handmade_input())["loss"].backward()
        held, one.blocks[1].scale.grad = one.blocks[0].scale.grad, None
        for number in (2, 3):
            with contextlib.nullcontext() if one is expected else module.no_sync():
                one(number * handmade_input())["loss"].backward()
        for block in one.blocks[:2]:
            block.scale.requires_grad_(False)
        one(4 * handmade_input())["loss"].backward()
        assert one.blocks[0].scale.grad is held
    torch.optim.SGD(module.parameters()).step()  # is refused while anything waits
    found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    grads = {name: p.grad for name, p in expected.named_parameters()}
    torch.testing.assert_close(found, grads, rtol=1e-10, atol=1e-12)
    return True


def _frozen() -> Any:
    module, builder = compiled_handmade(2)
    module(handmade_input())
    module.blocks[0].scale.requires_grad_(False)
    module(handmade_input())["loss"].backward()
    return (
        len(builder.seen),
        module.blocks[0].scale.grad is None,
        module.blocks[1].scale.grad is not None,
    )


def _meta() -> Any:
    """Weights that arrive after placement: by assignment, or into empty memory."""
    losses = []
    for assign in (True, False):
        with torch.device("meta"):
            model = Model().double()
        module: Any = DistributedModule(model, tensor_parallel_group(2), Builder(2))
        module.prepare(handmade_input())
        if not assign:
            module.to_empty(device="cpu")
        module.load_state_dict(handmade_model().state_dict(), assign=assign)
        assert module.blocks[0].up.weight.to_local().shape == (8, 4)
        losses.append(module(handmade_input())["loss"].item())
    return losses


def _dtype() -> Any:
    """A move to another dtype before the first call, with an optimizer that exists."""
    module, builder = compiled_handmade(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.float()
    module(handmade_input().float())["loss"].backward()
    before = module.blocks[0].up.weight.full_tensor().clone()
    optimizer.step()
    moved = not torch.equal(before, module.blocks[0].up.weight.full_tensor())
    return moved, str(builder.seen[0]["dtype"]), str(module.blocks[0].down.weight.placements[0])


def _rows() -> Any:
    """What ``_init_weights`` of HuggingFace's models does to the row of the padding."""
    module, _ = compiled_handmade(2)
    module(handmade_input())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)[-1].zero_()
    return [full(parameter).sum(0).unique().tolist() for parameter in module.parameters()], [
        [float(len(parameter) - 1)] for parameter in module.parameters()
    ]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_rehearsed(2, _many_things)


@pytest.mark.slow
def test_two_ranks_train_like_the_model(ranks: list[dict[str, Any]]) -> None:
    expected = expected_training()
    for result in ranks:
        same_training(result["train"], expected)
        same_training(result["foreach"], expected)


@pytest.mark.slow
def test_parameters_keep_their_identity_and_are_placed_once(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["parameters"]
    assert all(found[what] for what in ("kinds", "replicated", "same objects"))
    assert found["placements"]["blocks.0.up.weight"] == str(Shard(0))
    assert found["placements"]["blocks.0.down.weight"] == str(Shard(1))
    assert found["placements"]["blocks.0.scale"] == str(Replicate())
    assert (found["local"], found["shape"]) == ((8, 4), (16, 4))
    (seen,) = found["seen"]
    assert seen["fixed"] is None
    assert seen["shapes"]["blocks.0.up.weight"] == (16, 4)


@pytest.mark.slow
def test_no_sync_defers_reductions(ranks: list[dict[str, Any]]) -> None:
    assert [result["accumulation"] for result in ranks] == [True, True]


@pytest.mark.slow
def test_hooks_of_blocks_and_parameters_run(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["hooks"] == ["(8, 4)", "root", "post (8, 4)", "grad"]


@pytest.mark.slow
def test_state_dict_round_trip(ranks: list[dict[str, Any]]) -> None:
    assert all(result["state"] for result in ranks)


@pytest.mark.slow
def test_deepcopy_is_independent(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["copies"]
    assert len(set(found["losses"])) == 1
    assert all(found[what] for what in ("parameters", "grads"))
    assert found["compiled"] == 1
    assert found["optimizer"] == 8


@pytest.mark.slow
def test_grad_scaler(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["scaler"] == {"close": True, "skipped": True, "scale": 2.0}


@pytest.mark.slow
def test_ranks_that_differ_raise(ranks: list[dict[str, Any]]) -> None:
    assert [result["mismatch"] for result in ranks] == [True, True]


@pytest.mark.slow
def test_inplace_change_before_backward_raises(ranks: list[dict[str, Any]]) -> None:
    assert all(result["inplace"] for result in ranks)


@pytest.mark.slow
def test_freezing_compiles_again_and_gives_no_gradient(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["frozen"] == (2, True, True)
    assert ranks[0]["frozen_since"]


@pytest.mark.slow
def test_weights_can_come_after_compilation(ranks: list[dict[str, Any]]) -> None:
    expected = handmade_model()(handmade_input())["loss"].item()
    assert ranks[0]["meta"] == pytest.approx([expected, expected], rel=1e-12)


@pytest.mark.slow
def test_dtype_moves_keep_optimizers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dtype"] == (True, "torch.float32", str(Shard(1)))


@pytest.mark.slow
def test_rows_of_sharded_parameters_are_written(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found, expected = rank["rows"]
        assert found == expected


def test_a_parameter_that_shares_memory_is_refused(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        message, name, has_memory = result["shared"]
        assert f"parameter {name!r} and buffer 'view' of the model share memory" in message
        assert has_memory
