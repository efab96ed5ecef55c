"""Wrappers that people put around a compiled module: they work, or an error says what to do."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from tests.helpers.fake_group import fake_group
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import (
    assert_same_gradients,
    batch,
    compiled,
    gradients,
    net,
    num_compiled,
    prepared,
)

# Variables that torchrun sets.
_LAUNCHED = {
    "LOCAL_RANK": "0",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29599",
}
_DYNAMO_READS_THE_LOSS = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def _by_checkpoint(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint(lambda x: module(x)["loss"], x, use_reentrant=False)
    return loss


def _by_wrapper(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint_wrapper(module)(x)["loss"]
    return loss


@pytest.mark.parametrize("call", [_by_checkpoint, _by_wrapper])
def test_the_first_call_may_be_inside_a_checkpoint(call: Callable[..., Tensor]) -> None:
    """Tensors that the compilation saves are not counted; the caller's hooks are back after it."""
    module, model = compiled(), net()
    for one in (module, model):
        call(one, batch().requires_grad_()).backward()
    assert_same_gradients(module, model)


def test_torch_compile_of_a_compiled_module_is_one_opaque_call() -> None:
    module, model = compiled(), net()
    wrapped = torch.compile(module, backend="eager")
    for _ in range(2):
        loss = wrapped(batch())["loss"]
    true = model(batch())["loss"]
    torch.testing.assert_close(loss, true)
    loss.backward()
    true.backward()
    assert_same_gradients(module, model)


@_DYNAMO_READS_THE_LOSS
def test_torch_compile_of_a_training_step() -> None:
    """Torch traces what autograd calls from a compiled function: the backward is opaque too."""
    module, model, x = compiled(), net(), batch()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = module(x)["loss"]
        loss.backward()
        return loss

    torch.testing.assert_close(torch.compile(step, backend="eager")(x), model(x)["loss"])
    model(x)["loss"].backward()
    assert_same_gradients(module, model)


@_DYNAMO_READS_THE_LOSS
@pytest.mark.parametrize(
    "make",
    [
        compiled,
        lambda: compiled(overlap=False),
        lambda: torch.compile(net(), backend="sp_compiler"),
    ],
    ids=["compile", "no overlap", "backend"],
)
def test_compiled_autograd_is_refused(make: Callable[[], Any]) -> None:
    """It would trace generated code, without the engine that says whose ``grad`` to fill."""
    module, model = make(), net()
    loss = module(batch())["loss"]
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.raises(UnsupportedError, match=r"compiled_autograd.*call loss\.backward"),
    ):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert all(parameter.grad is None for parameter in module.parameters())
    loss.backward()
    model(batch())["loss"].backward()
    for parameter, true in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, true.grad)


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_refused(strict: bool) -> None:
    module = prepared()
    with pytest.raises(Exception, match=r"export the original model|compiled already"):
        torch.export.export(module, (batch(),), strict=strict)
    module(batch())["loss"].backward()


def test_pruning_is_refused_and_changes_nothing() -> None:
    module = prepared()
    with pytest.raises(UnsupportedError, match=r"'head'.*Prune .* before sp_compiler\.compile"):
        prune.l1_unstructured(module.head, "weight", amount=0.3)
    module(batch())["loss"].backward()
    assert set(dict(module.named_parameters())) == set(dict(net().named_parameters()))


def test_what_cannot_be_pickled_says_so() -> None:
    module = prepared()
    for value, advice in ((module, "state_dict"), (module.stages, r"plan\.to_json\(\)")):
        with pytest.raises(UnsupportedError, match=advice):
            pickle.dumps(value)
    pickle.dumps(module.plan)


def test_no_memory_while_the_model_is_prepared() -> None:
    """The error is torch's own, and the model can be used or compiled afterwards."""
    model, error = net(), torch.OutOfMemoryError("no memory is left")
    module = compiled(lambda: model)
    with (
        mock.patch("sp_compiler.module.source_model._without_memory", side_effect=error),
        pytest.raises(torch.OutOfMemoryError, match="no memory is left"),
    ):
        module(batch())
    module(batch())["loss"].backward()
    model = net()
    with (
        mock.patch("sp_compiler.module.source_model._without_memory", side_effect=error),
        pytest.raises(torch.OutOfMemoryError, match="no memory is left"),
    ):
        sp_compiler.compile(model, tp=1, example_inputs=((batch(),), {}))
    model(batch())


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_group(2):
        yield


@pytest.mark.usefixtures("two_ranks")
def test_data_parallel_wrappers_are_refused() -> None:
    module = sp_compiler.compile(net(), tp=2)
    with pytest.raises(UnsupportedError, match=r"accelerate\.prepare.*same batch on every rank"):
        DistributedDataParallel(module)


@pytest.mark.usefixtures("two_ranks")
def test_accelerate_and_trainer_get_the_same_error() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = sp_compiler.compile(net(), tp=2)
    with (
        mock.patch.dict("os.environ", _LAUNCHED),
        pytest.raises(UnsupportedError, match=r"transformers\.Trainer"),
    ):
        accelerate.Accelerator(cpu=True).prepare(module)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("by_mesh", [False, True])
def test_fully_shard_without_a_data_axis_says_what_to_do(by_mesh: bool) -> None:
    tp: Any = (
        {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))} if by_mesh else {"tp": 2}
    )
    module = sp_compiler.compile(net(), example_inputs=((batch(),), {}), **tp)
    for part in (module.get_submodule("blocks.0"), module):
        with pytest.raises(UnsupportedError, match=r"dp_shard and tp.*fsdp=False"):
            fully_shard(part)
    module.register_forward_pre_hook(lambda *_: None)  # anyone else's may


@pytest.mark.usefixtures("two_ranks")
def test_fully_shard_before_placement_says_what_to_do() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = sp_compiler.compile(net(), mesh=mesh["tp"])
    fully_shard(module, mesh=mesh["dp"])
    with pytest.raises(ArgumentError, match=r"fully_shard.*pass example_inputs"):
        module(batch())


def _copies() -> tuple[list[str], dict[str, Tensor]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = sp_compiler.compile(net(), tp=1)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "tp"))
        sp_compiler.compile(net(), mesh=mesh)
    replicated = DistributedDataParallel(module)
    replicated(batch(4, seed=dist.get_rank()))["loss"].backward()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith("tp=1")], gradients(module)


def test_copies_warn_once_and_distributed_data_parallel_averages_them() -> None:
    (first, averaged), (second, same) = run_on_ranks(2, _copies)
    assert second == []
    (text,) = first
    assert "tp=1 in 2 processes" in text
    assert "DistributedDataParallel" in text
    model = net()
    sum(model(batch(4, seed=rank))["loss"] / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(averaged, gradients(model), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(same[name], value) for name, value in averaged.items())


class _Replicated(DistributedDataParallel):
    """DistributedDataParallel without its process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (_Replicated, r"model is wrapped in _Replicated.*model\.module.*dp_replicate"),
        (nn.DataParallel, r"model is wrapped in DataParallel.*model\.module"),
        (lambda m: nn.Sequential(_Replicated(m)), r"model\.0 is wrapped .*model\.0\.module"),
        (torch.compile, r"wrapped by torch\.compile.*model\._orig_mod"),
    ],
)
def test_what_others_have_wrapped(wrap: Any, said: str) -> None:
    for refuse in (
        lambda model: sp_compiler.compile(model, tp=1),
        lambda model: sp_compiler.plan(model, ((batch(),), {}), tp=2),
    ):
        with pytest.raises(ArgumentError, match=said):
            refuse(wrap(net()))


def _stateless(module: Any, parameters: Any) -> Any:
    return torch.func.functional_call(module, parameters, (batch(),))


@pytest.mark.usefixtures("two_ranks")
def test_a_call_with_other_parameters_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It would compute with whole tensors by code for parts, or leave them without gradients."""
    divided = sp_compiler.compile(net(), tp=2, example_inputs=((batch(),), {}))
    whole = prepared()
    for module, parameters in (
        (divided, dict(net().named_parameters())),
        (divided, net().state_dict()),
        (divided, divided.state_dict()),
        (whole, net().state_dict()),
    ):
        with pytest.raises(
            UnsupportedError, match=r"substituted for parameter 'blocks.*load_state_dict"
        ):
            _stateless(module, parameters)
        assert num_compiled(module) == 1
    assert not any("compiled again" in text for text in caplog.messages)
    own = _stateless(whole, dict(whole.named_parameters()))
    torch.testing.assert_close(own["loss"], net()(batch())["loss"])
