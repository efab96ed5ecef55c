"""What a model's own classes say: types of its layers, methods that they override, state dicts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import sp_compiler
from sp_compiler import UnsupportedError
from sp_compiler.module.distributed_module import DistributedModule

_WIDTH = 8


class _Layer(nn.Module):
    """Keeps its norm frozen, writes a weight under another name, reads an older one, has a
    counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.times = 2
        self._register_load_state_dict_pre_hook(self._shorten)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.norm(x)) * self.times
        return y

    def train(self, mode: bool = True) -> _Layer:
        super().train(mode)
        self.norm.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> _Layer:
        super().requires_grad_(requires_grad)
        self.norm.weight.requires_grad_(False)
        return self

    def get_extra_state(self) -> Any:
        return self.times

    def set_extra_state(self, state: Any) -> None:
        self.times = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}written"] = self.up.weight.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}written")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _shorten(self, state_dict: Any, prefix: str, *args: Any) -> None:
        assert self.up.weight.isfinite().all()  # of the compiled module: the original has none
        for name in [name for name in state_dict if name.startswith(f"{prefix}linear.")]:
            state_dict[name.replace("linear", "up")] = state_dict.pop(name)


def _note_bias(module: Any, state: Any, *args: Any) -> None:
    state["seen"] = module.head.bias


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer()])
        self.head = nn.Linear(_WIDTH, 3)
        self._register_state_dict_hook(
            lambda module, state, *_: state.update(seen=module.head.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def _pair(make: Callable[[], nn.Module] = _Model) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().double().train()
    return sp_compiler.compile(copy.deepcopy(model), tp=1), model


def _x(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, _WIDTH, dtype=torch.float64, generator=generator)


def _assert_same(pair: tuple[Any, Any]) -> None:
    """Loss, gradients and buffers are the same."""
    found = []
    for one in pair:
        loss = one(_x())
        one.zero_grad()
        loss.backward()
        grads = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads, dict(one.named_buffers())))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_layers_are_of_the_models_classes() -> None:
    module, model = _pair()
    for one in (module, model):
        for layer in one.modules():
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.3)
            if isinstance(layer, (nn.BatchNorm1d, _Layer)):
                layer.eval()
    assert isinstance(module, DistributedModule)
    assert [type(m) for m in model.modules()] == [m.__class__ for m in module.modules()]
    _assert_same((module, model))


def test_statistics_are_updated_of_averaged_weights() -> None:
    found = []
    for one in _pair(lambda: nn.Sequential(nn.Linear(_WIDTH, 4), nn.BatchNorm1d(4))):
        one(_x(0)[0])
        averaged = torch.optim.swa_utils.AveragedModel(one)
        torch.optim.swa_utils.update_bn([_x(seed)[0] for seed in range(3)], averaged)
        found.append(dict(averaged.module.named_buffers()))
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_derived_class_is_one_of_the_mirror() -> None:
    """As ``fully_shard`` does."""
    layer = _pair()[0].layers[0].up
    mirror = type(layer)
    seen = layer.__class__
    with pytest.raises(UnsupportedError, match="remove '__class__' of module"):
        layer.__class__ = type("Derived", (seen,), {})
    layer.__class__ = type("FSDPLinear", (FSDPModule, seen), {"forward": None})
    assert isinstance(layer, FSDPModule)
    assert isinstance(layer, nn.Linear)
    assert type(layer).__mro__[1:3] == (FSDPModule, mirror)
    assert layer.forward is not None


def test_methods_that_the_model_overrides_run() -> None:
    pair = _pair()
    for one in pair:
        one.eval()
        one.train()
        one.layers[0].requires_grad_(True)
    assert not pair[0].layers[0].norm.training
    assert not pair[0].layers[0].norm.weight.requires_grad
    _assert_same(pair)


def test_state_dicts_are_made_and_read_as_the_model_does() -> None:
    pair = _pair()
    saved = [one.state_dict() for one in pair]
    torch.testing.assert_close(*[dict(state) for state in saved], rtol=0, atol=0)
    assert {"seen", "layers.0.written", "layers.0._extra_state"} < set(saved[0])
    for one, state in zip(pair, saved, strict=True):
        older = {name.replace(".up.", ".linear."): value for name, value in state.items()}
        del older["seen"]
        older["layers.0.linear.weight"] = older["layers.0.linear.weight"] * 3
        one.load_state_dict({**older, "layers.0._extra_state": 5})
        assert one.layers[0].times == 5
    _assert_same(pair)


def test_a_forward_that_would_not_run_is_refused() -> None:
    module, _ = _pair()
    with pytest.raises(UnsupportedError, match=r"'forward' of module 'layers\.0'.*before sp_com"):
        module.layers[0].forward = lambda x: x
    with pytest.raises(UnsupportedError, match=r"remove 'running_mean' of module 'layers"):
        del module.layers[0].norm.running_mean


class _Gains(nn.ParameterList):
    def __contains__(self, size: object) -> bool:
        return any(gain.numel() == size for gain in self)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = _Gains([torch.ones(_WIDTH), torch.ones(1)])

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = x * gain
        return x.square().mean()


def test_operators_of_a_list_of_parameters() -> None:
    pair = _pair(_Scaled)
    for one in pair:
        with torch.no_grad():
            one.gains[1].fill_(len(one.gains))
        one.gains[0] = nn.Parameter(torch.full((_WIDTH,), 3.0, dtype=torch.float64))
        assert _WIDTH in one.gains
        assert 5 not in one.gains
    _assert_same(pair)


class _Stack(nn.Module):
    """Has its layers by number, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class _Row(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("make", [_Stack, _Row])
def test_layers_of_the_model_itself_have_numbers(make: Callable[[], nn.Module]) -> None:
    pair: Any = _pair(make)
    for one in (*pair, copy.deepcopy(pair[0])):
        assert len(one) == 3
        with torch.no_grad():
            one[1].weight.mul_(2)
        # Without __iter__ Python counts up to the first IndexError.
        assert [layer.weight for layer in one] == [*one.parameters()][::2]
    _assert_same(pair)


def test_layers_of_a_compiled_sequential_are_fixed() -> None:
    module: Any = _pair(_Row)[0]
    assert [*module[1:]] == [module[1], module[2]]
    for change in (
        lambda: module.append(nn.GELU()),
        lambda: module.insert(0, nn.GELU()),
        lambda: module.__setitem__(0, nn.GELU()),
        lambda: module.pop(0),
    ):
        with pytest.raises(UnsupportedError, match=r"'[03]' of module '\(model\)'.*before sp_com"):
            change()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


def test_parameters_that_are_untied_are_refused() -> None:
    pair = _pair(_Tied)
    _assert_same(pair)
    for one in pair:
        one.down.weight = nn.Parameter(one.up.weight.detach() * 2)
    for one in (pair[0], copy.deepcopy(pair[0])):
        with pytest.raises(UnsupportedError, match=r"'up\.weight' and 'down\.weight' are no"):
            one(_x())
    for one in pair:
        one.up.weight = one.down.weight
    _assert_same(pair)


def test_threads_may_compile() -> None:
    pair = [_pair() for _ in range(2)]
    found: dict[int, Tensor] = {}

    def call(index: int) -> None:
        module, _ = pair[index % 2]
        with torch.no_grad():
            found[index] = module(_x(index))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        expected = {index: pair[index % 2][1](_x(index)) for index in range(4)}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
