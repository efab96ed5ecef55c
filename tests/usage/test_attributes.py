"""Attributes that a forward stores on ``self`` are there after a call, as with the model itself."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from tests.helpers.slow import slow
from tests.helpers.users import assert_same_gradients, batch, compiled, num_compiled

WIDTH = 8


class Block(nn.Module):
    """Attention that keeps its weights, and statistics of them in every way there is."""

    def __init__(self, log: list[Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.log = 0, log
        self.aux_loss: Any = None
        self.stats: dict[str, Tensor] = {}
        self.of_this_call: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / 2).softmax(-1)
        self.calls += 1
        self.last_attention = weights
        self.aux_loss = weights.square().mean()
        self.log.append(weights.amax())
        self.stats["mean"] = weights.detach().mean()
        self.of_this_call.clear()
        self.of_this_call.append((weights.sum(), "weights"))
        return x + self.out((weights @ v).transpose(1, 2).reshape(shape))


class Model(nn.Module):
    """Blocks that share one list, and logits that are stored and returned."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.log: list[Tensor] = []
        self.blocks = nn.ModuleList(Block(self.log) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 12)
        self.has_run = False

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        self.logits = logits = self.head(x)
        self.has_run = True
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def model() -> Any:
    torch.manual_seed(0)
    return Model().double()


def inputs(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return batch(*shape, seed=seed), torch.randint(0, 12, shape, generator=generator)


def loss_of(module: Any, *args: Tensor) -> Tensor:
    """A loss of the output and of what every layer left behind."""
    loss: Tensor = module(*args)["loss"] + 3 * torch.stack(module.log).sum()
    for block in module.blocks:
        loss = loss + block.aux_loss + block.of_this_call[0][0] / 100
    return loss + module.blocks[1].last_attention[..., 0].sum()


@pytest.mark.slow
def test_attributes_hold_what_eager_code_leaves_and_gradients_flow_through_them() -> None:
    module, eager = compiled(model), model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, shape in enumerate([(2, 4), (2, 4), (3, 6)]):
            for one in (module, eager):
                one.log.clear()
                loss_of(one, *inputs(*shape, seed=seed)).backward()
            assert_same_gradients(module, eager)
    assert num_compiled(module) == 2  # one for each shape: no number of calls is part of the key
    assert module.has_run is True
    assert len(module.log) == len(module.blocks[1].log) == 2
    for left, right in zip(module.blocks, eager.blocks, strict=True):
        assert left.calls == right.calls == 3
        assert len(left.of_this_call) == 1
        assert left.of_this_call[0][1] == "weights"
        torch.testing.assert_close(left.last_attention, right.last_attention)
        torch.testing.assert_close(left.stats, right.stats)
        assert not left.stats["mean"].requires_grad
    torch.testing.assert_close(module.logits, eager.logits)
    assert list(module.state_dict()) == list(eager.state_dict())
    with torch.no_grad():
        module(*inputs(2, 4))
    assert not module.blocks[0].aux_loss.requires_grad


def test_attributes_can_be_set_and_copied() -> None:
    module = compiled(model, example_inputs=(inputs(2, 4), {}))
    module(*inputs(2, 4))
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin.blocks[0].aux_loss, module.blocks[0].aux_loss.detach())
    module.blocks[0].aux_loss = None
    module.blocks[0].stats = {}
    twin.blocks[0].calls = 7
    for one in (module, twin):
        one(*inputs(2, 4))
    assert module.blocks[0].aux_loss.requires_grad
    assert set(module.blocks[0].stats) == {"mean"}
    assert (module.blocks[0].calls, twin.blocks[0].calls) == (2, 8)
    assert num_compiled(module) == 1


class _LossAlone(Model):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_nothing_of_the_head_is_recomputed_though_stored_tensors_come_behind_it() -> None:
    """They are only handed on: backward starts with the head all the same."""
    found = sp_compiler.plan(_LossAlone(3).double(), (inputs(2, 4), {}), tp=1, recompute="full")
    *_, head, handed_on = found.blocks
    assert (handed_on.name, handed_on.kept) == ("Outputs", ())
    assert "head" in [tensor.name for tensor in head.kept]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_stored_tensors_and_their_gradients_are_right_on_every_rank(tp: int) -> None:
    source = model()
    source.log.append(torch.tensor(-1.0))  # of an earlier call
    report = sp_compiler.verify(source, (inputs(2, 4), {}), tp=tp)
    assert report.ok, report


def test_parameters_that_a_loss_does_not_reach_have_no_gradient() -> None:
    """Zeros would be decayed, and moved by an optimizer's momentum."""
    module, eager = compiled(_routed), _routed()
    args = inputs(2, 4)
    for of in (
        lambda one: one(*args)["loss"],
        lambda one: one(*args)["loss"] + one.block.aux_loss,
        lambda one: (one(*args), one.block.aux_loss)[1],
        lambda one: one(*args)["logits"].sum(),
        lambda one: (one(*args), one.block.last_attention.square().sum() + one.logits.sum())[1],
    ):
        for one in (module, eager):
            one.zero_grad()
            of(one).backward()
        assert_same_gradients(module, eager)
        present = [parameter.grad is None for parameter in module.parameters()]
        assert present == [parameter.grad is None for parameter in eager.parameters()]


def _routed() -> Any:
    """A model with a gate that only ``aux_loss`` reads, in one region with all the rest."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block([]), nn.Linear(WIDTH, 12)
            self.gate = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.block.log.clear()
            self.logits = logits = self.head(self.block(x))
            self.block.aux_loss = self.gate(x).square().mean()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    return Routed().double()


class Stateful(nn.Module):
    """Changes one attribute in a way that a subclass says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.change(x)).sum()

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _stateful(start: Callable[[], Any], change: Callable[[Any, Tensor], Tensor]) -> Any:
    torch.manual_seed(0)
    result: Any = type("Kind", (Stateful,), {"change": change})().double()
    result.state = start()
    return result


def memory(self: Any, x: Tensor) -> Tensor:
    before, self.state = self.state, x.detach().mean(0)
    return x if before is None else x + before


def summed(self: Any, x: Tensor) -> Tensor:
    self.state.append(x.mean())
    return x * sum(self.state)


def averaged(self: Any, x: Tensor) -> Tensor:
    self.state = 0.9 * self.state + 0.1
    return x


def phase(self: Any, x: Tensor) -> Tensor:
    self.state = {0: 1}.get(self.state, "done")
    return x


def ring(self: Any, x: Tensor) -> Tensor:
    self.state.append(x.mean())
    if len(self.state) > 2:
        self.state.pop(0)
    return x


@pytest.mark.parametrize(
    ("start", "change", "named"),
    [
        (lambda: None, memory, "state (None -> a tensor)"),
        slow(lambda: torch.zeros(WIDTH).double(), memory, "state (a tensor -> a tensor)"),
        (list, summed, "state (list of 0 -> list of 1)"),
        (lambda: 0.5, averaged, "state (0.5 -> 0.55)"),
        (int, phase, "state (0 -> 1)"),
        slow(lambda: [None, None], ring, "state (list of 2 -> list of 2)"),
    ],
)
def test_state_that_a_program_cannot_carry_on_is_named_once(
    start: Callable[[], Any], change: Any, named: str
) -> None:
    """It would be fixed without a word; the model itself stays as it was."""
    source = _stateful(start, change)
    before = copy.copy(source.state)
    module = compiled(lambda: source)
    with pytest.warns(UserWarning, match="forward changes attributes") as caught:
        module(batch(3)).backward()
    (warning,) = caught
    assert named in str(warning.message)
    assert "register_buffer" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(batch(4))
    assert torch.is_tensor(before) or module.state == before


class Frozen(dict[str, float]):
    """Like the configuration of a model of diffusers."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize("make", [OrderedDict, lambda items: defaultdict(float, items), Frozen])
def test_dicts_of_every_class_stay_as_they_were(make: Callable[..., Any]) -> None:
    """Each capture reads them; one that were empty from the second on would be silently wrong."""
    source = _stateful(lambda: make({"scale": 3.0}), lambda self, x: x * self.state["scale"])
    table, eager = source.state, copy.deepcopy(source)
    module = compiled(lambda: source)
    for shape in ((3,), (4, 5)):
        torch.testing.assert_close(module(batch(*shape)), eager(batch(*shape)))
    assert module.state is table
    assert table == {"scale": 3.0}


def test_an_ordered_dict_is_filled() -> None:
    def noted(self: Any, x: Tensor) -> Tensor:
        self.state["mean"] = x.mean()
        return x

    module, eager = (
        build(_stateful(OrderedDict, noted))
        for build in (lambda m: compiled(lambda: m), lambda m: m)
    )
    for rows in (3, 4):
        module(batch(rows))
        eager(batch(rows))
        assert type(module.state) is OrderedDict
        torch.testing.assert_close(module.state, eager.state)


def counted(self: Any, x: Tensor) -> Tensor:
    self.state += 1
    return x * self.state


def first_time(self: Any, x: Tensor) -> Tensor:
    before, self.state = self.state, False
    return x * 2 if before else x


@pytest.mark.parametrize(("start", "change", "num"), [(0, counted, 3), (True, first_time, 2)])
def test_numbers_that_decide_what_is_computed_are_part_of_the_key(
    start: Any, change: Any, num: int
) -> None:
    module = compiled(lambda: _stateful(lambda: start, change))
    eager = _stateful(lambda: start, change)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            left, right = module(batch(3, seed=seed)), eager(batch(3, seed=seed))
            torch.testing.assert_close(left, right, rtol=1e-12, atol=0)
            assert module.state == eager.state
    assert num_compiled(module) == num
    texts = [str(each.message) for each in caught]
    assert any("numbers that it changes: state" in text for text in texts) == (change is counted)


class _CountsFromItsClass(nn.Module):
    """A counter whose start is an attribute of the class, and a tensor that is none there."""

    calls = 0
    latest: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x.mean()
        return self.linear(x) * self.calls


@pytest.mark.filterwarnings("ignore:forward computes with numbers that it changes")
def test_what_a_class_has_before_a_forward_sets_it() -> None:
    torch.manual_seed(0)
    source = _CountsFromItsClass().double()
    eager = copy.deepcopy(source)
    module = compiled(lambda: source)
    for seed in range(3):
        x = batch(3, seed=seed)
        torch.testing.assert_close(module(x), eager(x))
        torch.testing.assert_close(module.latest, eager.latest)
        assert module.calls == eager.calls == seed + 1
    assert (_CountsFromItsClass.calls, _CountsFromItsClass.latest) == (0, None)
