"""The compiled module on one rank, with a handmade program behind it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sp_compiler.base.errors import (
    ArgumentError,
    NotCompiledError,
    UnsupportedError,
)
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.module.parameters import are_held_by_modules_alone
from sp_compiler.module.source_model import check_not_taken
from sp_compiler.runtime.group import tensor_parallel_group
from tests.helpers.handmade_module import (
    Builder,
    compiled_handmade,
    expected_training,
    handmade_input,
    handmade_model,
    same_training,
    train,
)
from tests.models.handmade import Model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_one_rank_trains_like_the_model() -> None:
    same_training(train(1), expected_training())


def test_errors_before_and_around_compilation() -> None:
    module, _ = compiled_handmade(1)
    for what in ("plan", "code", "stages"):
        with pytest.raises(NotCompiledError, match="nothing is compiled"):
            getattr(module, what)
    with pytest.raises(UnsupportedError, match="state_dict"):
        pickle.dumps(module)
    with pytest.raises(UnsupportedError, match=r"TorchScript.*before its compilation"):
        torch.jit.script(module)
    with pytest.raises(UnsupportedError, match=r"TorchScript.*before its compilation"):
        torch.jit.trace(module, (handmade_input(),))
    with pytest.raises(UnsupportedError, match="cannot be called alone"):
        module.blocks[0](handmade_input())
    with pytest.raises(UnsupportedError, match="cannot be called alone"):
        module.blocks[0](x=handmade_input())
    with pytest.raises(UnsupportedError, match="generate"):
        module.generate()
    with pytest.raises(ArgumentError, match="compiled module already"):
        DistributedModule(module, tensor_parallel_group(1), Builder(1))
    with pytest.raises(ArgumentError, match=r"torchrun.*sp_compiler\.plan.*sp_compiler\.verify"):
        tensor_parallel_group(2)


def test_the_original_is_taken_over() -> None:
    model = handmade_model()
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    with pytest.raises(UnsupportedError, match=r"sp_compiler\.compile returned"):
        model(handmade_input())
    with pytest.raises(ArgumentError, match="compiled before"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert module.config is model.config
    assert not any(parameter.is_meta for parameter in module.parameters())


def test_optimizers_of_the_original_are_refused() -> None:
    model = handmade_model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"SGD.*after sp_compiler\.compile"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))
    del early


def test_models_are_searched_for_optimizers_where_something_else_holds_a_parameter() -> None:
    model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=bool(index)) for index in range(3)))
    model[2].weight = model[0].weight  # two modules hold it
    model[0](torch.ones(2)).sum().backward()
    assert are_held_by_modules_alone(model)
    for index in (0, 1, 2):
        early = torch.optim.SGD([model[index].weight])
        assert not are_held_by_modules_alone(model)
        with pytest.raises(ArgumentError, match="SGD"):
            check_not_taken(model)
        del early
        assert are_held_by_modules_alone(model)
    assert not are_held_by_modules_alone(model[2])


def test_optimizers_are_found_of_modules_that_share_a_table_and_of_parameters_in_no_module() -> (
    None
):
    shared = nn.Linear(2, 2)
    copies = nn.Sequential(shared, copy.copy(shared), copy.copy(shared))

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self)["inner"] = nn.Linear(2, 2)

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return vars(self)["inner"].parameters(recurse)  # type: ignore[no-any-return]

    assert are_held_by_modules_alone(copies)
    for model in (copies, Hiding()):
        early = torch.optim.SGD(model.parameters())
        with pytest.raises(ArgumentError, match="SGD"):
            check_not_taken(model)
        del early


@pytest.mark.parametrize("restored", [False, True], ids=["made", "restored"])
def test_the_first_optimizer_of_a_class_marks_it(restored: bool) -> None:
    """Without a mark nothing is searched for optimizers."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure

    model = handmade_model()
    state = pickle.loads(pickle.dumps(torch.optim.SGD(model.parameters()).__getstate__()))
    assert not hasattr(Own.step, "hooked")
    early = Own.__new__(Own)
    if restored:
        early.__setstate__(state)
        early.param_groups[0]["params"] = list(model.parameters())
    else:
        early.__init__(model.parameters())  # type: ignore[misc]
    assert hasattr(Own.step, "hooked")
    with pytest.raises(ArgumentError, match=r"Own.*after sp_compiler\.compile"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))


def test_hooks_inside_the_original_are_refused() -> None:
    model = handmade_model()
    model.blocks[0].register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0"):
        DistributedModule(model, tensor_parallel_group(1), Builder(1))


def test_mode_dtype_and_cache() -> None:
    module, builder = compiled_handmade(1)
    module.eval()
    module.float()
    with torch.inference_mode():
        out = module(handmade_input().float())
    assert not out["loss"].requires_grad
    assert builder.seen[0]["training"] is False
    assert builder.seen[0]["dtype"] is torch.float32
    module(handmade_input().float())["loss"].backward()
    with torch.no_grad():
        module(handmade_input().float())
    assert len(builder.seen) == 1
    module.train()
    module(handmade_input().float())
    module(handmade_input().float()[:4])
    assert len(builder.seen) == 3
    assert builder.seen[2]["fixed"] is not None


def test_buffers_are_written_back_and_ties_kept() -> None:
    model = handmade_model()
    model.blocks[1].scale = model.blocks[0].scale
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    assert module.blocks[1].scale is module.blocks[0].scale
    assert {"blocks.0.scale", "blocks.1.scale"} <= set(module.state_dict())
    module(handmade_input())
    module(handmade_input())
    assert module.steps.item() == 2


def test_meta_models_stay_so_until_loaded() -> None:
    with torch.device("meta"):
        model = Model().double()
    module = DistributedModule(model, tensor_parallel_group(1), Builder(1))
    module.prepare(handmade_input())
    with pytest.raises(ArgumentError, match=r"9 parameters or buffers.*assign=True"):
        module(handmade_input())
    module.load_state_dict(handmade_model().state_dict(), assign=True)
    torch.testing.assert_close(
        module(handmade_input())["loss"], handmade_model()(handmade_input())["loss"]
    )


_CHANGES: dict[str, Callable[[Any], object]] = {
    "a module": lambda m: setattr(m, "blocks", nn.Linear(4, 4)),
    "add_module": lambda m: m.add_module("blocks", nn.Linear(4, 4)),
    "register_module": lambda m: m.register_module("head", nn.Linear(4, 4)),
    "an element": lambda m: m.blocks.__setitem__(0, nn.Linear(4, 4)),
    "append": lambda m: m.blocks.append(nn.Linear(4, 4)),
    "del of an element": lambda m: m.blocks.__delitem__(0),
    "insert": lambda m: m.blocks.insert(0, nn.Linear(4, 4)),
    "pop": lambda m: m.blocks.pop(0),
    "del": lambda m: delattr(m, "blocks"),
    "None": lambda m: setattr(m, "blocks", None),
    "del of a parameter": lambda m: delattr(m.blocks[0], next(iter(m.blocks[0]._parameters))),
    "a parameter": lambda m: setattr(
        m.blocks[0], next(iter(m.blocks[0]._parameters)), nn.Parameter(torch.ones(9))
    ),
    "register_parameter": lambda m: m.blocks[0].register_parameter(
        next(iter(m.blocks[0]._parameters)), nn.Parameter(torch.ones(9))
    ),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_modules_and_parameters_cannot_be_replaced(change: str) -> None:
    module, _ = compiled_handmade(1)
    module(handmade_input())
    names = list(dict(module.named_parameters()))
    with pytest.raises(UnsupportedError, match=r"change the model before sp_compiler\.compile"):
        _CHANGES[change](module)
    assert list(dict(module.named_parameters())) == names
