"""The compiled module on two gloo ranks, and alone, with a handmade program behind it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from sp_compiler.base.errors import (
    ArgumentError,
    NotCompiledError,
    RankMismatchError,
    UnsupportedError,
)
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.runtime.group import tensor_parallel_group
from tests.helpers.ranks import run_on_ranks
from tests.models.handmade import Model, handmade

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Builder:
    """Counts compilations and looks at the model as the compiler would."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.seen: list[dict[str, Any]] = []

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: Any,
        open_dims: bool,
    ) -> CompiledProgram:
        self.seen.append(
            {
                "training": model.training,
                "fixed": fixed,
                "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
                "dtype": next(model.parameters()).dtype,
                "keys": list(kwargs),
            }
        )
        return handmade(self.world_size)


def _model() -> Any:
    torch.manual_seed(3)
    return Model().double()


def _input() -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _compiled(world_size: int) -> tuple[Any, Builder]:
    builder = Builder(world_size)
    return DistributedModule(_model(), tensor_parallel_group(world_size), builder), builder


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _train(world_size: int, foreach: bool | None = None) -> dict[str, Any]:
    """Three AdamW steps with clipping and a schedule; optimizer made before the first call."""
    module, _ = _compiled(world_size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=foreach)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms, losses = [], []
    for _ in range(3):
        out = module(_input())
        out["loss"].backward()
        norms.append(_full(nn.utils.clip_grad_norm_(module.parameters(), 0.5)).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(out["loss"].item())
    state = {name: _full(value).detach().clone() for name, value in module.state_dict().items()}
    return {"norms": norms, "losses": losses, "state": state}


def _expected_training() -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms, losses = [], []
    for _ in range(3):
        out = model(_input())
        out["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(out["loss"].item())
    return {"norms": norms, "losses": losses, "state": model.state_dict()}


def _same_training(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-10, atol=0)
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-10, atol=0)
    assert list(actual["state"]) == list(expected["state"])
    torch.testing.assert_close(actual["state"], dict(expected["state"]), rtol=1e-9, atol=1e-12)


def test_one_rank_trains_like_the_model() -> None:
    _same_training(_train(1), _expected_training())


def _many_things() -> dict[str, Any]:
    """What is cheap to do in one pair of processes; each entry is checked by one test below."""
    result: dict[str, Any] = {"train": _train(2), "foreach": _train(2, foreach=True)}
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
        _meta,
        _dtype,
    ):
        result[check.__name__.lstrip("_")] = check()
    return result


def _parameters() -> Any:
    module, builder = _compiled(2)
    before = dict(module.named_parameters())
    kinds = {type(p._local_tensor) for p in before.values()}
    replicated = all(p.placements == (Replicate(),) for p in before.values())
    module(_input())
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
        module, _ = _compiled(2)
        if deferred:
            with module.no_sync():
                module(_input())["loss"].backward()
            pending = module.blocks[0].scale.grad is None
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with pytest.raises(UnsupportedError, match="no_sync"):
                optimizer.step()
        else:
            module(_input())["loss"].backward()
        module(2 * _input())["loss"].backward()
        grads[deferred] = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    torch.testing.assert_close(grads[True], grads[False], rtol=1e-12, atol=1e-15)
    return pending


def _hooks() -> Any:
    module, _ = _compiled(2)
    events: list[str] = []
    module.register_forward_hook(lambda m, args, out: events.append("root"))
    module.blocks[1].register_forward_hook(
        lambda m, args, out: events.append(str(tuple(out.shape)))
    )
    module.blocks[0].scale.register_hook(lambda grad: events.append("grad"))
    module.blocks[0].up.weight.register_post_accumulate_grad_hook(
        lambda parameter: events.append(f"post {tuple(parameter.grad.to_local().shape)}")
    )
    module(_input())["loss"].backward()
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up"):
        module.blocks[0].up.register_forward_hook(lambda *args: None)
    late, _ = _compiled(2)
    late.blocks[0].up.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up"):
        late(_input())
    return events


def _state() -> Any:
    module, _ = _compiled(2)
    module(_input())
    whole = {name: value.clone() for name, value in _model().state_dict().items()}
    changed = {name: value + 1 for name, value in whole.items()}
    module.load_state_dict(changed)
    from_plain = {name: _full(v).clone() for name, v in module.state_dict().items()}
    other, _ = _compiled(2)
    other.load_state_dict(module.state_dict())
    from_distributed = {name: _full(v).clone() for name, v in other.state_dict().items()}
    torch.testing.assert_close(from_plain, changed, rtol=0, atol=0)
    torch.testing.assert_close(from_distributed, changed, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**changed, "blocks.0.scale": torch.zeros(5)})
    return True


def _copies() -> Any:
    module, builder = _compiled(2)
    loss = module(_input())["loss"].item()
    twin = copy.deepcopy(module)
    twin_loss = twin(_input())["loss"].item()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin(_input())["loss"].backward()
    return {
        "losses": (loss, twin_loss, module(_input())["loss"].item()),
        "compiled": len(builder.seen),
        "parameters": all(isinstance(p, nn.Parameter) for p in twin.parameters()),
        "grads": all(p.grad is None for p in module.parameters()),
        "optimizer": len(torch.optim.AdamW(twin.parameters()).param_groups[0]["params"]),
    }


def _scaler() -> Any:
    module, _ = _compiled(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(module(_input())["loss"]).backward()
    scaler.unscale_(optimizer)
    expected = _model()
    expected(_input())["loss"].backward()
    close = all(
        torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-10)
        for p, q in zip(module.parameters(), expected.parameters(), strict=True)
    )
    scaler.step(optimizer)
    scaler.update()
    # An overflow that only rank 0 sees must stop the step on both ranks.
    before = module.blocks[0].up.weight.full_tensor().clone()
    scaler.scale(module(_input())["loss"]).backward()
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
    module, _ = _compiled(2)
    with pytest.raises(RankMismatchError, match="same inputs") as caught:
        module(_input()[: 4 + 2 * dist.get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SP_COMPILER_CHECK", "1")
        good, _ = _compiled(2)
        good(_input())
        with pytest.raises(RankMismatchError, match="input '0' differs"):
            good(_input() + dist.get_rank())
        unequal = _model()
        nn.init.constant_(unequal.blocks[1].down.weight, dist.get_rank())
        bad = DistributedModule(unequal, tensor_parallel_group(2), Builder(2))
        with pytest.raises(RankMismatchError, match=r"blocks\.1\.down\.weight"):
            bad(_input())
    return "(4, 4)" in str(caught.value) and "(6, 4)" in str(caught.value)


def _inplace() -> Any:
    module, _ = _compiled(2)
    loss = module(_input())["loss"]
    with torch.no_grad():
        module.blocks[0].scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


def _frozen() -> Any:
    module, builder = _compiled(2)
    module(_input())
    module.blocks[0].scale.requires_grad_(False)
    module(_input())["loss"].backward()
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
        module.prepare(_input())
        if not assign:
            module.to_empty(device="cpu")
        module.load_state_dict(_model().state_dict(), assign=assign)
        assert module.blocks[0].up.weight.to_local().shape == (8, 4)
        losses.append(module(_input())["loss"].item())
    return losses


def _dtype() -> Any:
    """A move to another dtype before the first call, with an optimizer that exists."""
    module, builder = _compiled(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.float()
    module(_input().float())["loss"].backward()
    before = module.blocks[0].up.weight.full_tensor().clone()
    optimizer.step()
    moved = not torch.equal(before, module.blocks[0].up.weight.full_tensor())
    return moved, str(builder.seen[0]["dtype"]), str(module.blocks[0].down.weight.placements[0])


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _many_things)


@pytest.mark.slow
def test_two_ranks_train_like_the_model(ranks: list[dict[str, Any]]) -> None:
    expected = _expected_training()
    for result in ranks:
        _same_training(result["train"], expected)
        _same_training(result["foreach"], expected)


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
        assert result["hooks"] == ["(4, 4)", "root", "post (8, 4)", "grad"]


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


@pytest.mark.slow
def test_weights_can_come_after_compilation(ranks: list[dict[str, Any]]) -> None:
    expected = _model()(_input())["loss"].item()
    assert ranks[0]["meta"] == pytest.approx([expected, expected], rel=1e-12)


@pytest.mark.slow
def test_dtype_moves_keep_optimizers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dtype"] == (True, "torch.float32", str(Shard(1)))


def test_errors_before_and_around_compilation() -> None:
    module, _ = _compiled(1)
    for what in ("plan", "code", "stages"):
        with pytest.raises(NotCompiledError, match="nothing is compiled"):
            getattr(module, what)
    with pytest.raises(UnsupportedError, match="state_dict"):
        pickle.dumps(module)
    with pytest.raises(UnsupportedError, match="cannot be called alone"):
        module.blocks[0](_input())
    with pytest.raises(UnsupportedError, match="generate"):
        module.generate()
    with pytest.raises(ArgumentError, match="compiled module already"):
        DistributedModule(module, tensor_parallel_group(1), Builder(1))
    with pytest.raises(ArgumentError, match=r"torchrun.*sp_compiler\.plan.*sp_compiler\.verify"):
        tensor_parallel_group(2)


def test_the_original_is_taken_over() -> None:
    model = _model()
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    with pytest.raises(UnsupportedError, match=r"sp_compiler\.compile returned"):
        model(_input())
    with pytest.raises(ArgumentError, match="compiled before"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert module.config is model.config
    assert not any(parameter.is_meta for parameter in module.parameters())


def test_optimizers_made_too_early_are_refused() -> None:
    model = _model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"SGD.*after sp_compiler\.compile"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))
    del early
    module, _ = _compiled(1)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(ArgumentError, match="AdamW has state"):
        module(_input())


def test_hooks_inside_the_original_are_refused() -> None:
    model = _model()
    model.blocks[0].register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))


def test_mode_dtype_and_cache() -> None:
    module, builder = _compiled(1)
    module.eval()
    module.float()
    with torch.inference_mode():
        out = module(_input().float())
    assert not out["loss"].requires_grad
    assert builder.seen[0]["training"] is False
    assert builder.seen[0]["dtype"] is torch.float32
    module(_input().float())["loss"].backward()
    with torch.no_grad():
        module(_input().float())
    assert len(builder.seen) == 1
    module.train()
    module(_input().float())
    module(_input().float()[:4])
    assert len(builder.seen) == 3
    assert builder.seen[2]["fixed"] is not None


def test_buffers_are_written_back_and_ties_kept() -> None:
    model = _model()
    model.blocks[1].scale = model.blocks[0].scale
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    assert module.blocks[1].scale is module.blocks[0].scale
    assert {"blocks.0.scale", "blocks.1.scale"} <= set(module.state_dict())
    module(_input())
    module(_input())
    assert module.steps.item() == 2


def test_meta_models_stay_so_until_loaded() -> None:
    with torch.device("meta"):
        model = Model().double()
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    module.prepare(_input())
    with pytest.raises(ArgumentError, match=r"9 parameters or buffers.*assign=True"):
        module(_input())
    module.load_state_dict(_model().state_dict(), assign=True)
    torch.testing.assert_close(module(_input())["loss"], _model()(_input())["loss"])
