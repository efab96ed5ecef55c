"""Saving loses nothing: whole weights, adapters, and no file with a part taken for the whole."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import visualize_sharding

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.ranks import run_on_copies
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.helpers.users import net, prepared
from tests.models import architectures, zoo

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

_CHANGES = ("merge_and_unload", "merge_adapter", "unload", "load_adapter", "set_adapter")
_ADAPTER = "adapter_model.safetensors"


def _adapters(folder: Path, tp: int) -> None:
    """Adapters of a trained module: saved, loaded into another and into the model itself."""
    peft = pytest.importorskip("peft")
    inputs = zoo.inputs("peft_gpt2")
    module: Any = sp_compiler.compile(zoo.build("peft_gpt2"), tp=tp)
    module(**inputs).loss.backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    loss = module(**inputs).loss.item()
    state = module.full_state_dict()
    if tp == 1:
        module.save_pretrained(folder)
    elif state:
        module.save_pretrained(folder, state_dict=state)
        assert state, "HuggingFace empties the dict that it is given"
    if tp > 1:
        dist.barrier()
    saved = load_file(folder / _ADAPTER)
    model = zoo.build("peft_gpt2")
    assert set(saved) == set(peft.get_peft_model_state_dict(model))
    assert all("lora_" in name for name in saved)
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder)))
    assert model(**inputs).loss.item() == pytest.approx(loss, rel=1e-9)
    assert model.merge_and_unload()(**inputs).loss.item() == pytest.approx(loss, rel=1e-9)  # type: ignore[operator]
    other: Any = sp_compiler.compile(zoo.build("peft_gpt2"), tp=tp)
    result = peft.set_peft_model_state_dict(other, peft.load_peft_weights(str(folder)))
    assert not result.unexpected_keys
    assert other(**inputs).loss.item() == pytest.approx(loss, rel=1e-9)
    if tp > 1:
        # Of placed weights PEFT asks which rows a rank has, and those of c_attn are no range.
        with pytest.raises(UnsupportedError, match=r"set_peft_model_state_dict.*before the"):
            peft.set_peft_model_state_dict(other, peft.load_peft_weights(str(folder)))
        other(**inputs).loss.backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert other(**inputs).loss.item() != pytest.approx(loss, rel=1e-9)
        state = {name.replace(".weight", ".default.weight"): saved[name] for name in saved}
        assert not other.load_state_dict(state, strict=False).unexpected_keys
        assert other(**inputs).loss.item() == pytest.approx(loss, rel=1e-9)
    for name in _CHANGES:
        with pytest.raises(UnsupportedError, match=rf"{name}\(\) would change the adapters"):
            getattr(module, name)
        with pytest.raises(UnsupportedError, match=r"full_state_dict\(\)"):
            getattr(module.base_model, name)


@pytest.mark.slow
def test_adapters_of_one_rank(tmp_path: Path) -> None:
    with shared_programs():
        _adapters(tmp_path, 1)


def test_full_weights_of_one_rank() -> None:
    module = prepared()
    state = module.full_state_dict()
    assert list(state) == list(net().state_dict())
    net().load_state_dict(state)


def test_methods_of_the_users_own_may_be_called_like_those_of_peft() -> None:
    class Merging(nn.Linear):
        def merge(self) -> str:
            return "merged"

    module: Any = sp_compiler.compile(Merging(2, 2), tp=1)
    assert module.merge() == "merged"


def _full(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _grouped_queries(ranks: int) -> architectures.Size:
    """Widths that all ranks divide: of a fused q, k, v weight the segments are unequal."""
    return architectures.Size(
        heads=2 * ranks,
        kv=ranks,
        hidden=16 * ranks,
        ffn=32 * ranks,
        vocab=32 * ranks,
        batch=2,
        seq=12,
        experts=ranks,
    )


def _compile(size: architectures.Size, tp: int) -> None:
    with architectures.float64(), shared_programs():
        compile_for_ranks(
            architectures.build("phi3", size), architectures.inputs("phi3", size), tp=tp
        )


def _true_tensors(size: architectures.Size) -> bool:
    """Parameters, gradients and state of optimizers are the model's own, of each name."""
    with architectures.float64(), shared_programs(only_known=True):
        model: Any = architectures.build("phi3", size)
        module: Any = sp_compiler.compile(
            architectures.build("phi3", size), tp=dist.get_world_size()
        )
        inputs = architectures.inputs("phi3", size)
        module(**inputs)
        moments = []
        for one in (module, model):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
            one.zero_grad()
            one(**inputs).loss.backward()
            optimizer.step()
            moments.append(
                {name: optimizer.state[p]["momentum_buffer"] for name, p in one.named_parameters()}
            )
        segmented = 0
        for name, own in model.named_parameters():
            parameter = module.get_parameter(name)
            if "segments" in repr(parameter.placements):
                segmented += 1
                if dist.get_rank() == 0:  # which would print the rows of all ranks
                    with pytest.raises(UnsupportedError, match=r"segments.*full_tensor\(\)"):
                        visualize_sharding(parameter)
            pairs = ((parameter, own), (parameter.grad, own.grad), [m[name] for m in moments])
            for got, want in pairs:
                # The model casts its norms to float32; rows in another order are off by all.
                bound = 1e-6 * want.abs().max().item()
                torch.testing.assert_close(_full(got), want.detach(), rtol=1e-6, atol=bound)
        assert segmented >= 2
        state = module.full_state_dict()
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)
        assert bool(state) == (dist.get_rank() == 0)
    return True


def _files(folder: str) -> bool:
    """Pickling a part raises; copies and whole weights do not."""
    module: Any = sp_compiler.compile(zoo.build("plain", layers=1), tp=2)
    optimizer = torch.optim.AdamW(module.parameters())
    zoo.loss_of(module(**zoo.inputs("plain"))).backward()
    optimizer.step()
    for state in (module.state_dict(), optimizer.state_dict(), list(module.parameters())):
        with pytest.raises(
            UnsupportedError, match=r"only this rank's part.*full_state_dict\(\) on all ranks"
        ):
            torch.save(state, Path(folder, f"part{dist.get_rank()}"))
        copy.deepcopy(state)
    full = module.full_state_dict()
    assert bool(full) == (dist.get_rank() == 0)
    pickle.dumps(full)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "tp"))
    with pytest.raises(UnsupportedError, match=r'"other" of 2 ranks.*fully_shard'):
        sp_compiler.compile(net(), mesh=mesh)
    with shared_programs():
        _adapters(Path(folder), 2)
    return True


def _with_fsdp() -> bool:
    """Two axes: the module tensor-parallel, and wrapped by FSDP over the other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    size = architectures.size("dividing", 2)
    with architectures.float64(), shared_programs(only_known=True):
        inputs = architectures.inputs("phi3", size)
        build = lambda: architectures.build("phi3", size)  # noqa: E731
        model: Any = build()
        module: Any = sp_compiler.compile(build(), mesh=mesh["tp"], example_inputs=((), inputs))
        fully_shard(module, mesh=mesh["dp"])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in module.state_dict().items():
            assert torch.equal(_full(value), before[name]), name
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name]), name
        for one in (model, module):
            # Means over each dim of the gradients; it rounds to bfloat16 in between.
            optimizer = torch.optim.Adafactor(one.parameters(), lr=0.01)
            one(**inputs).loss.backward()
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                optimizer.step()
        after = module.state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(_full(after[name]), value, rtol=1e-6, atol=1e-7)
        fused = [n for n, p in module.named_parameters() if "segments" in repr(p.placements)]
        assert fused
        assert all(after[name].placements[-1] == Shard(0) for name in fused)
        for name, value in module.full_state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)
        saved = copy.deepcopy(after)
        module.load_state_dict(before)
        for name, value in module.state_dict().items():
            assert torch.equal(_full(value), before[name]), name
        module.load_state_dict(saved)
        for name, value in module.state_dict().items():
            assert torch.equal(_full(value), _full(saved[name])), name
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_tensors_of_grouped_queries_are_true(world_size: int) -> None:
    size = _grouped_queries(world_size)
    before = functools.partial(_compile, size, world_size)
    assert all(run_on_copies(world_size, before, _true_tensors, size))


@pytest.mark.slow
def test_files_of_two_ranks(tmp_path: Path) -> None:
    assert all(run_rehearsed(2, _files, str(tmp_path)))


@pytest.mark.slow
def test_weights_under_fully_shard() -> None:
    before = functools.partial(_compile, architectures.size("dividing", 2), 2)
    assert all(run_on_copies(4, before, _with_fsdp))
