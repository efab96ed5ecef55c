"""Use of FSDP2 with a compiled module on four ranks: it works, or all ranks say why not."""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import sp_compiler
from sp_compiler import RankMismatchError, UnsupportedError
from sp_compiler.compiler import build
from tests.helpers.grids import whole
from tests.helpers.ranks import run_on_copies, run_on_ranks
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.helpers.two_ranks import result, run_checks
from tests.helpers.users import Net, batch, net

_MESHES: dict[str, DeviceMesh] = {}


def _mesh(data: str = "dp_shard") -> DeviceMesh:
    if data not in _MESHES:
        _MESHES[data] = init_device_mesh("cpu", (2, 2), mesh_dim_names=(data, "tp"))
    return _MESHES[data]


def _own(mesh: DeviceMesh, x: Tensor) -> Tensor:
    part, parts = sp_compiler.data_shard(mesh)
    return x.chunk(parts)[part]


def _compiled(data: str = "dp_shard", **options: Any) -> Any:
    mesh = _mesh(data)
    return sp_compiler.compile(
        net(), mesh=mesh, example_inputs=((_own(mesh, batch()),), {}), **options
    )


def _assert_gradients(module: Any, model: nn.Module) -> None:
    true = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), true[name].grad, rtol=1e-9, atol=1e-12)


def gradients_add_up_over_backwards() -> None:
    """Without no_sync: what is there is reduced already; the second of two forwards goes first."""
    module, model = _compiled(), net()
    inputs = [batch(seed=seed) for seed in range(4)]
    for x in inputs[:2]:
        module(_own(_mesh(), x))["loss"].backward()
    losses = [module(_own(_mesh(), x))["loss"] for x in inputs[2:]]
    (losses[1] + losses[0]).backward()
    for x in inputs:
        model(x)["loss"].backward()
    _assert_gradients(module, model)


def an_optimizer_made_behind_a_forward_trains_all_parameters() -> None:
    """FSDP leaves those of the root gathered, of which a step would be lost."""
    module, model = _compiled(), net()
    shards = list(module.parameters())
    module.unshard()  # ahead of the first call
    assert all(map(operator.is_, module.parameters(), shards))
    for context in (torch.no_grad(), contextlib.nullcontext()):
        with context:
            module(_own(_mesh(), batch()))
        with torch.no_grad():
            for either in (module, model):  # as an average of weights is put in
                for parameter in either.parameters():
                    parameter.mul_(0.9)
    loss = module(_own(_mesh(), batch()))["loss"]  # made between forward and backward
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.1) for either in (module, model)]
    with torch.no_grad():  # what backward reads is gathered again
        module(_own(_mesh(), batch()))
    loss.backward()
    model(batch())["loss"].backward()
    _assert_gradients(module, model)
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():  # as evaluation between a step and the next one's zero_grad
        module(_own(_mesh(), batch()))
    module.zero_grad()
    assert all(p.grad is None for p in optimizers[0].param_groups[0]["params"])
    true = model.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(whole(value), true[name], rtol=1e-9, atol=1e-12)
    assert module(_own(_mesh(), batch()))["loss"].requires_grad
    module.requires_grad_(False)
    assert not module(_own(_mesh(), batch()))["loss"].requires_grad


def what_it_marks_modules_with_compiles_nothing_anew() -> None:
    with mock.patch("sp_compiler.api.build", wraps=build) as compiles:
        module = _compiled()
        module(_own(_mesh(), batch()))["loss"].backward()
    assert compiles.call_count == 1
    module.scale = 2.0  # which forward does not read
    with mock.patch("sp_compiler.api.build", wraps=build) as compiles:
        module(_own(_mesh(), batch()))["loss"].backward()
    assert compiles.call_count == 0


def the_switch_is_fsdps_own_too() -> None:
    module, model = _compiled(), net()
    inputs = [batch(seed=seed) for seed in range(3)]
    module.set_requires_gradient_sync(False)
    module(_own(_mesh(), inputs[0]))["loss"].backward()
    with module.no_sync():
        module(_own(_mesh(), inputs[1]))["loss"].backward()
    module.set_requires_gradient_sync(True)
    module(_own(_mesh(), inputs[2]))["loss"].backward()
    for x in inputs:
        model(x)["loss"].backward()
    _assert_gradients(module, model)


def hooks_see_full_gradients() -> None:
    module, model = _compiled(), net()
    seen: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({name: whole(p.grad)})
        )
    module(_own(_mesh(), batch()))["loss"].backward()
    model(batch())["loss"].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-9, atol=1e-12)


def hooks_that_fsdp_does_not_run_are_refused() -> None:
    """Of a parameter in a block and of one outside, in a backward after which others go on."""
    for data in ("dp_shard", "dp_replicate"):
        module, model, x = _compiled(data), net(), _own(_mesh(data), batch())
        for name in ("blocks.0.up.weight", "head.bias"):
            handle = module.get_parameter(name).register_hook(lambda grad: 2 * grad)
            with pytest.raises(UnsupportedError, match=rf"{name} has a hook .*post_accumulate"):
                module(x)["loss"].backward()
            handle.remove()
        module.zero_grad()
        module(x)["loss"].backward()
        model(batch())["loss"].backward()
        _assert_gradients(module, model)


def checkpoints_around_the_module() -> None:
    """Beside another call in the same loss; those with a backward of their own before it only."""
    module, x = _compiled(), [_own(_mesh(), batch(seed=seed)) for seed in range(2)]

    def loss(one: Any, x: Tensor, use_reentrant: bool) -> Tensor:
        shift = torch.zeros((), dtype=x.dtype, requires_grad=True)
        run = lambda x, shift: one(x)["loss"] + shift  # noqa: E731
        return checkpoint(run, x, shift, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        (loss(module, x[0], True) + module(x[1])["loss"]).backward()
    for first, second in ((None, True), (None, False), (False, None), (True, True)):
        module.zero_grad()
        model = net()
        for one, inputs in ((module, x), (model, [batch(seed=seed) for seed in range(2)])):
            parts = [
                one(part)["loss"] if kind is None else loss(one, part, kind)
                for part, kind in zip(inputs, (first, second), strict=True)
            ]
            (parts[0] + parts[1]).backward()
        _assert_gradients(module, model)


def frozen_parameters_have_no_gradients() -> None:
    module, model = _compiled(), net()
    for one in (module, model):
        one.blocks[0].norm.weight.requires_grad_(False)
        one.blocks[1].up.requires_grad_(False)
    module(_own(_mesh(), batch()))["loss"].backward()
    model(batch())["loss"].backward()
    true = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (true[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                whole(parameter.grad), true[name].grad, rtol=1e-9, atol=1e-12
            )


def root_alone_and_other_sizes() -> None:
    """``fully_shard`` at the root, no gradient mode, and a call that is compiled afterwards."""
    module, model = _compiled(fsdp=False), net()
    fully_shard(module, mesh=_mesh()["dp_shard"])
    for x in (batch(), batch(8, 6)):
        with torch.no_grad():
            y = module(_own(_mesh(), x))["y"]
        torch.testing.assert_close(whole(y), _own(_mesh(), model(x)["y"]))
        module(_own(_mesh(), x))["loss"].backward()
        model(x)["loss"].backward()
    _assert_gradients(module, model)


def the_largest_gradient_is_nan_wherever_it_lies() -> None:
    module = _compiled()
    for holder in range(torch.distributed.get_world_size()):
        module.zero_grad()
        module(_own(_mesh(), batch()))["loss"].backward()
        if torch.distributed.get_rank() == holder:
            module.blocks[0].up.weight.grad.to_local().view(-1)[0] = float("nan")
        assert sp_compiler.clip_grad_norm_(module, 1e9, float("inf")).isnan(), holder


def weights_differ_over_data() -> None:
    for data in ("dp_shard", "dp_replicate"):
        part, _ = sp_compiler.data_shard(_mesh(data))
        example: Any = ((_own(_mesh(data), batch()),), {})
        model = net()
        with torch.no_grad():
            model.head.bias.add_(part)
        match = rf"'head\.bias' differs between .*data-parallel group \"{data}\""
        with pytest.raises(RankMismatchError, match=match):
            sp_compiler.compile(model, mesh=_mesh(data), example_inputs=example)
        model = net()
        with torch.no_grad():
            model.head.bias.add_(part)
        module: Any = sp_compiler.compile(
            model, mesh=_mesh(data), example_inputs=example, initial_weights="broadcast"
        )
        assert torch.equal(whole(module.head.bias), net().head.bias)


def what_the_hooks_do_not_see_is_refused() -> None:
    """Gradients that nobody would average, steps without gradients, copies."""
    for data in ("dp_shard", "dp_replicate"):
        module = _compiled(data)
        x = _own(_mesh(data), batch())
        at_rest = list(module.parameters())
        loss = module(x)["loss"]
        for wanted in (at_rest, list(module.parameters())):
            with pytest.raises(UnsupportedError, match=r"backward\(inputs=.*data axis"):
                torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        with pytest.raises(UnsupportedError, match=r"backward\(inputs=.*data axis"):
            loss.backward(inputs=at_rest, retain_graph=True)
        # Of what is no parameter a gradient is as good as ever.
        x.requires_grad_()
        (grad,) = torch.autograd.grad(module(x)["loss"], x)
        model, own = net(), x.detach().requires_grad_()
        model(own)["loss"].backward()
        torch.testing.assert_close(grad, own.grad)
        with pytest.raises(UnsupportedError, match=r"deepcopy .* on a data axis"):
            copy.deepcopy(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with module.no_sync():
            module(x.detach())["loss"].backward()
        for call in (optimizer.step, lambda module=module: sp_compiler.clip_grad_norm_(module, 1)):
            with pytest.raises(UnsupportedError, match=r"while gradients are deferred by no_sync"):
                call()
        module.zero_grad()
        optimizer.step()
        module(x.detach())["loss"].backward()
        model = net()
        model(batch())["loss"].backward()
        _assert_gradients(module, model)


def zero_grad_of_a_part_drops_what_waits_for_it() -> None:
    module, model, x = _compiled(), net(), _own(_mesh(), batch())
    with module.no_sync():
        module(x)["loss"].backward()
    # A part of one of FSDP's groups.
    module.blocks[0].up.zero_grad()
    module(x)["loss"].backward()
    model(batch())["loss"].backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("blocks.0.up."):
            assert parameter.grad is not None
            parameter.grad *= 2
    _assert_gradients(module, model)


def batches_differ_over_tp() -> None:
    module = _compiled()
    rank = torch.distributed.get_rank()
    with pytest.raises(RankMismatchError, match=r"data_shard\(mesh\)"):
        module(batch(2, 6, seed=rank))


class _Borrowing(Net):
    """Uses a block's parameter behind it too, as T5 does with its table of positions."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        for block in self.blocks:
            x = block(x)
        norm: Any = self.blocks[0].get_submodule("norm")
        return {"loss": (self.head(x) * norm.weight.sum()).square().mean()}


def _borrowing() -> Any:
    torch.manual_seed(5)
    return _Borrowing().double()


def a_block_whose_parameters_others_use() -> None:
    """Wrapped by hand an error names the parameter; left to compile it stays with the root."""
    x = _own(_mesh(), batch())
    example: Any = ((x,), {})
    by_hand: Any = sp_compiler.compile(
        _borrowing(), mesh=_mesh(), example_inputs=example, fsdp=False
    )
    for block in by_hand.blocks:
        fully_shard(block, mesh=_mesh()["dp_shard"])
    fully_shard(by_hand, mesh=_mesh()["dp_shard"])
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.norm\.weight.*outside of blocks"):
        by_hand(x)
    module: Any = sp_compiler.compile(_borrowing(), mesh=_mesh(), example_inputs=example)
    wrapped = [isinstance(block, FSDPModule) for block in module.blocks]
    assert wrapped == [False, True]
    model = _borrowing()
    module(x)["loss"].backward()
    model(batch())["loss"].backward()
    _assert_gradients(module, model)


_CHECKS = [
    gradients_add_up_over_backwards,
    an_optimizer_made_behind_a_forward_trains_all_parameters,
    what_it_marks_modules_with_compiles_nothing_anew,
    the_switch_is_fsdps_own_too,
    hooks_see_full_gradients,
    hooks_that_fsdp_does_not_run_are_refused,
    checkpoints_around_the_module,
    frozen_parameters_have_no_gradients,
    root_alone_and_other_sizes,
    the_largest_gradient_is_nan_wherever_it_lies,
    weights_differ_over_data,
    a_block_whose_parameters_others_use,
    what_the_hooks_do_not_see_is_refused,
    zero_grad_of_a_part_drops_what_waits_for_it,
    batches_differ_over_tp,
]


def _compile() -> None:
    """What most checks need; requests for other sizes and gradients every rank compiles itself."""
    with shared_programs():
        for model in (net, _borrowing):
            for fsdp in (True, False):
                compile_for_ranks(model(), [batch()[:2]], tp=2, fsdp=fsdp)


def _all() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return run_checks(_CHECKS)


@pytest.mark.slow
def test_fsdp_as_users_call_it() -> None:
    ranks = run_on_copies(4, _compile, _all)
    for check in _CHECKS:
        result(ranks, check.__name__)


def _written(*, with_fsdp: bool) -> dict[str, Tensor]:
    """Parameters after writes into rows, of plain tensors and of what they were."""
    module: Any = net()
    if with_fsdp:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
        module = sp_compiler.compile(module, mesh=mesh, example_inputs=((_own(mesh, batch()),), {}))
        module(_own(mesh, batch()))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter[0] = 3.0
            parameter.mul_(torch.linspace(1, 2, parameter.numel()).view(parameter.shape))
            parameter.data += 1
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def _written_with_fsdp() -> dict[str, Tensor]:
    return _written(with_fsdp=True)


@pytest.mark.slow
def test_writes_without_tensor_parallelism_are_those_of_one_device() -> None:
    expected = _written(with_fsdp=False)
    for written in run_on_ranks(2, _written_with_fsdp):
        torch.testing.assert_close(written, expected, rtol=1e-15, atol=0)
