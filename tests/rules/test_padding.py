"""Dims that do not divide by the number of ranks, sharded with padding behind them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import sp_compiler
from sp_compiler.base.placement import Placement, R, S
from sp_compiler.ir.fx import calls
from sp_compiler.ops import vocabulary
from sp_compiler.planning.fallbacks import fallbacks
from sp_compiler.rules.padding import POINTWISE, RELABELLING
from sp_compiler.runtime.padding import padded_part, stored_part
from tests.helpers import parity
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.slow import slow

_VOCABULARY, _WIDTH, _INNER = 131, 32, 100


class _Model(nn.Module):
    """Soft-capped logits; a gate whose padding is not zero; a scale that sums over padding."""

    def __init__(
        self, vocabulary: int = _VOCABULARY, *, tied: bool = True, capped: bool = True
    ) -> None:
        super().__init__()
        self.capped = capped
        self.tokens = nn.Embedding(vocabulary, _WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.norm = nn.LayerNorm(_WIDTH)
        self.gate, self.up = nn.Linear(_WIDTH, _INNER), nn.Linear(_WIDTH, _INNER)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)
        self.head = nn.Linear(_WIDTH, vocabulary)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        normed = self.norm(x)
        x = x + self.down(torch.sigmoid(self.gate(normed)) * self.up(normed) * self.scale)
        logits = self.head(x)
        if self.capped:
            logits = 20 * torch.tanh(logits / 20)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def _model(**options: Any) -> _Model:
    torch.manual_seed(0)
    return _Model(**options).double()


def _inputs(seed: int = 0, vocabulary: int = _VOCABULARY) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(vocabulary, (2, 3, 9), generator=generator)
    labels[0, -3:] = -100
    return {"ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("tp", "tied"),
    [(2, True), (3, False), *(slow(tp, tied) for tp in (4, 8) for tied in (True, False))],
)
def test_a_vocabulary_and_a_width_are_padded(tp: int, tied: bool) -> None:
    found = parity.make_case(_model(tied=tied), _inputs())
    for sequence_parallel in (True, False):
        program = parity.assert_parity(found, tp=tp, sequence_parallel=sequence_parallel)
        placed = program.param_placements
        for name in ("head.bias", "head.weight"):
            placement = placed[program.param_name(name)]
            assert placement == S(0, (_VOCABULARY,)), name
        inner = (_INNER,) if _INNER % tp else ()
        assert placed["up.weight"] == placed["gate.bias"] == S(0, inner)
        assert placed["down.weight"] == S(1, inner)
        assert f'dst="S(1|{_VOCABULARY})"' not in program.code  # nothing is padded on the way
        assert f"{_VOCABULARY})" in program.code
        assert not list(fallbacks(program))


@pytest.mark.parametrize("recompute", ["none", slow("full")])
@pytest.mark.parametrize("vocabulary", [5, 9, 17])
def test_ranks_that_have_padding_alone(vocabulary: int, recompute: str) -> None:
    """Nine classes over eight ranks are 2 + 2 + 2 + 2 + 1 + 0 + 0 + 0."""
    model = _model(vocabulary=vocabulary, tied=False)
    found = parity.make_case(model, _inputs(vocabulary=vocabulary))
    parity.assert_parity(found, tp=8, recompute=recompute)


def test_logits_far_below_the_padding() -> None:
    """The padding is no class, however much larger it is than all logits."""
    model = _model(tied=False, capped=False)
    with torch.no_grad():
        model.head.bias.sub_(3000)
    found = parity.make_case(model, _inputs())
    program = parity.assert_parity(found, tp=4)
    assert program.param_placements["head.weight"].padding(4) == 1


@pytest.mark.parametrize("vocabulary", [128, _VOCABULARY])
def test_logits_of_minus_infinity(vocabulary: int) -> None:
    """Classes that are forbidden, whole ranks of them."""
    model = _model(vocabulary=vocabulary, tied=False, capped=False)
    with torch.no_grad():
        model.head.bias[-50:] = -math.inf
        model.head.bias[0] = -math.inf
    inputs = _inputs(vocabulary=70)
    inputs["labels"] = inputs["labels"].clamp(min=1)
    found = parity.make_case(model, inputs)
    step = parity.simulate(found, parity.compiled(found, tp=4))
    torch.testing.assert_close(step.outputs[0], found.outputs[0], rtol=1e-10, atol=0)
    assert found.outputs[0].isfinite()


def test_a_loss_that_counts_the_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parity.make_case(_model(), _inputs())
    program = parity.compiled(found, tp=4)
    monkeypatch.setattr(vocabulary, "padding_columns", lambda *_: None)
    assert parity.output_error(parity.simulate(found, program), found) > 1e-6


class _Mixed(nn.Module):
    """Operators after a product that a padded dim must not reach."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operator(self.up(x))).square().mean()


_NOT_PADDED = {
    "logarithm": lambda x: (x * 0).add(x.abs()).log(),
    "division": lambda x: x / (x * x + 1),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "heads": lambda x: x.unflatten(-1, (10, 10)).transpose(-1, -2).flatten(-2).cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "slice": lambda x: F.pad(x[..., 3:], (0, 3)),
}


@pytest.mark.parametrize("name", _NOT_PADDED)
def test_what_cannot_be_padded_is_whole(name: str) -> None:
    torch.manual_seed(1)
    model = _Mixed(_NOT_PADDED[name]).double()
    x = torch.randn(3, 9, _WIDTH, dtype=torch.float64).requires_grad_()
    found = parity.make_case(model, {"x": x})
    program = parity.assert_parity(found, tp=8)
    allowed = (
        *POINTWISE,
        *RELABELLING,
        torch.ops.aten.linear.default,
        torch.ops.sp_compiler.convert.default,
    )
    (region,) = program.program.regions
    for node in region.module.graph.nodes:
        if node.op == "call_function":
            operands = [node, *node.all_input_nodes]
            is_padded = any(operand.meta.get("placement", R).padding(8) for operand in operands)
            assert not is_padded or node.target in allowed, node.target


@pytest.mark.parametrize("number", [lambda x: x / 0.0, lambda x: x * math.inf])
def test_numbers_that_make_nothing_finite_of_zero(number: Any) -> None:
    """Zero weights make them NaN, which a sum over the padding would find."""
    torch.manual_seed(1)
    model = _Mixed(lambda x: number(x).sigmoid()).double()
    model.up.requires_grad_(False)
    x = torch.randn(3, 9, _WIDTH, dtype=torch.float64)
    found = parity.make_case(model, {"x": x}, hints={"down.weight": Shard(1)})
    parity.assert_parity(found, tp=8)


class _MadeWeight(nn.Module):
    """A weight whose padding would not be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _INNER), nn.Linear(_INNER, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, torch.sigmoid(self.up.weight))
        return F.linear(hidden.tanh(), torch.sigmoid(self.down.weight)).square().mean()


def test_a_weight_that_is_no_parameter_is_not_padded() -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 9, _WIDTH, dtype=torch.float64).requires_grad_()
    found = parity.make_case(_MadeWeight().double(), {"x": x})
    program = parity.assert_parity(found, tp=8)
    (region,) = program.program.regions
    for node in calls(region.module.graph, torch.ops.aten.linear.default):
        assert not node.args[1].meta["placement"].padding(8)


@pytest.mark.parametrize("placement", [S(0, (7,)), S(1, (5,)), S(0, (2,))], ids=str)
def test_a_chunk_has_room_for_its_padding(placement: Placement) -> None:
    whole = torch.arange(35.0).view(7, 5).narrow(placement.dim, 0, placement.segments[0])
    world_size, parts = 4, []
    for rank in range(world_size):
        chunk = stored_part(whole, placement, rank, world_size)
        parts.append(chunk)
        assert chunk.is_contiguous()  # kernels of fused optimizers take that for granted
        chunk += 1  # as an optimizer does
        seen = padded_part(chunk, placement, world_size)
        shared = seen.untyped_storage().data_ptr() == chunk.untyped_storage().data_ptr()
        assert shared or placement.dim
        assert seen.sum() == chunk.sum(), "the padding was written to"
        copied = padded_part(chunk.clone(), placement, world_size)
        assert torch.equal(copied, seen)
        assert seen.shape[placement.dim] == -(-placement.segments[0] // world_size)
    assert torch.equal(torch.cat(parts, placement.dim), whole + 1)


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = module(**_inputs(step))["loss"]
        loss.backward()
        losses += [loss.item(), _number(nn.utils.clip_grad_norm_(module.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _number(value: Tensor) -> float:
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def _on_ranks(folder: str) -> dict[str, Any]:
    world_size = dist.get_world_size()
    found: dict[str, Any] = {}
    module = sp_compiler.compile(_model(), tp=world_size, example_inputs=((), _inputs()))
    optimizer = _adam(module)
    found["losses"] = _train(module, optimizer, range(3))
    weight = module.down.weight
    found["shapes"] = [tuple(p.to_local().shape) for p in (module.tokens.weight, weight)]
    found["placements"] = [p.placements for p in (module.tokens.weight, weight)]
    found["grads"] = _gradients(module)
    found["logits"] = _logits(module)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    found["state"] = {name: value.clone() for name, value in whole.items()}

    model_state, optimizer_state = get_state_dict(module, optimizer)
    checkpoint.save({"m": model_state, "o": optimizer_state}, checkpoint_id=f"{folder}/steps")
    resumed = sp_compiler.compile(_model(), tp=world_size, example_inputs=((), _inputs()))
    new = _adam(resumed)
    model_state, optimizer_state = get_state_dict(resumed, new)
    # Loaded in place.
    checkpoint.load({"m": model_state, "o": optimizer_state}, checkpoint_id=f"{folder}/steps")
    set_state_dict(resumed, new, model_state_dict=model_state, optim_state_dict=optimizer_state)
    found["resumed"] = _train(resumed, new, range(3, 5))
    found["went on"] = _train(module, optimizer, range(3, 5))

    read = sp_compiler.compile(_empty(), tp=world_size, example_inputs=((), _inputs()))
    read.load_pretrained(f"{folder}/model.safetensors")
    found["read"] = read(**_inputs())["loss"].item()
    found["room"] = [_room(read)]

    loss = read(**_inputs())["loss"]
    with torch.no_grad():
        read.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    outside = _inputs()
    outside["ids"][0, 0] = _VOCABULARY
    with pytest.raises(IndexError, match=f"{_VOCABULARY} is out of range"):
        module(**outside)
    del loss  # nothing is converted while a graph holds it
    found["room"] += [_room(read.float()), _room(read.double())]
    assert read.float()(**_inputs())["loss"].isfinite()
    return found


def _empty() -> nn.Module:
    with torch.device("meta"):
        return _model(tied=False)


def _compile(_: str) -> None:
    """Nothing runs: torch would remember how much of each tensor one rank has."""
    for model in (_model(), _empty()):
        sp_compiler.compile(model, tp=3, example_inputs=((), _inputs()))


def _room(module: nn.Module) -> int:
    """Elements of the storage of a padded weight."""
    local = module.head.weight.to_local()
    return local.untyped_storage().nbytes() // local.element_size()


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    module(**_inputs(7))["loss"].backward()
    grads = {name: p.grad.full_tensor().clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return grads


def _logits(module: nn.Module) -> tuple[Any, Tensor, Tensor]:
    """Placed by vocabulary; a loss outside of the graph flows back through them."""
    logits = module(**_inputs(7))["logits"]
    assert isinstance(logits, DTensor)
    logits.square().mean().backward()
    assert module.head.bias.grad is not None
    grad = module.head.bias.grad.full_tensor().clone()
    module.zero_grad()
    return logits.placements, logits.full_tensor().detach(), grad


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("padding"))
    state = {name: value.contiguous() for name, value in _model(tied=False).state_dict().items()}
    save_file(state, f"{folder}/model.safetensors")
    return run_rehearsed(3, _on_ranks, folder, rehearsal=_compile)


@pytest.mark.slow
def test_three_ranks_train_as_one(ranks: list[dict[str, Any]]) -> None:
    model = _model()
    optimizer = _adam(model)
    losses = _train(model, optimizer, range(3))
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["losses"], losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(found["state"], dict(model.state_dict()), rtol=1e-8, atol=1e-9)
        rows = min(44, _VOCABULARY - 44 * rank)
        columns = min(34, _INNER - 34 * rank)
        assert found["shapes"] == [(rows, _WIDTH), (_WIDTH, columns)]
        assert found["placements"] == [(Shard(0),), (Shard(1),)]
    model(**_inputs(7))["loss"].backward()
    for found in ranks:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["grads"][name], parameter.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_padded_logits_are_dtensors_of_the_vocabulary(ranks: list[dict[str, Any]]) -> None:
    model = _model()
    _train(model, _adam(model), range(3))
    logits = model(**_inputs(7))["logits"]
    logits.square().mean().backward()
    for found in ranks:
        placements, actual, grad = found["logits"]
        assert placements == (Shard(2),)
        torch.testing.assert_close(actual, logits.detach(), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(grad, model.head.bias.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_checkpoints_of_padded_weights(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        torch.testing.assert_close(found["resumed"], found["went on"], rtol=1e-11, atol=0)


@pytest.mark.slow
def test_pretrained_weights_are_read_with_room(ranks: list[dict[str, Any]]) -> None:
    loss = _model(tied=False)(**_inputs())["loss"].item()
    for found in ranks:
        assert found["read"] == pytest.approx(loss, rel=1e-12)
        assert found["room"] == [math.ceil(_VOCABULARY / 3) * _WIDTH] * 3
