"""Attention heads whose number does not divide by the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint

import sp_compiler
from sp_compiler.base.placement import Placement, S
from sp_compiler.base.shards import join_parts, local_part
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.planning.fallbacks import fallbacks
from sp_compiler.runtime.padding import padded_part, stored_part, stored_shape
from tests.helpers import parity
from tests.helpers.ranks import run_on_ranks
from tests.helpers.slow import slow, slow_but

_WIDTH, _DEPTH = 16, 4


class _Attention(nn.Module):
    """Attention of queries and grouped keys, separate or fused, with ``core`` between the two."""

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        *,
        fused: str = "",
        core: Callable[..., Tensor] | None = None,
        p: float = 0.0,
        depth: int = _DEPTH,
        width: int = _WIDTH,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.fused, self.p, self.depth = fused, p, depth
        self.core = core or self.explicit
        self.norm = nn.LayerNorm(width)
        sizes = [count * depth for count in (self.heads, self.kv_heads, self.kv_heads)]
        if fused:
            self.qkv = nn.Linear(width, sum(sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(width, size) for size in sizes)
        self.sizes = sizes
        self.out = nn.Linear(sizes[0], width)

    def explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.depth)
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        probabilities = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return F.dropout(probabilities, self.p, self.training) @ v

    def parts(self, x: Tensor) -> list[Tensor]:
        batch, length, _ = x.shape
        if self.fused == "view":
            qkv = self.qkv(x).view(batch, length, 3, self.heads, self.depth)
            return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))
        if self.fused:
            projected = self.qkv(x).split(self.sizes, -1)
        else:
            projected = self.q(x), self.k(x), self.v(x)
        return [y.view(batch, length, -1, self.depth).transpose(1, 2) for y in projected]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(self.norm(x))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        context = self.core(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(context)


def _case(model: nn.Module) -> parity.Case:
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return parity.make_case(_Loss(model).double(), {"x": x.requires_grad_()})


class _Loss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def _assert_padded(found: parity.Case, tp: int, names: str) -> CompiledProgram:
    program = parity.assert_parity(found, tp=tp)
    for name in names.split():
        assert program.param_placements[f"body.{name}.weight"].padding(tp), name
    return program


@pytest.mark.parametrize("tp", [4, *map(slow, (2, 3, 8))])
def test_heads_are_padded(tp: int) -> None:
    """With dropout, whose masks are those of one device."""
    heads = 5 if tp < 8 else 12
    program = _assert_padded(_case(_Attention(heads, p=0.2)), tp, "q k v out")
    width = heads * _DEPTH
    assert program.param_placements["body.q.weight"] == S(0, (width,), heads)
    assert program.param_placements["body.q.bias"] == S(0, (width,), heads)
    assert program.param_placements["body.out.weight"] == S(1, (width,), heads)
    assert not list(fallbacks(program))


@pytest.mark.parametrize("fused", ["view", slow("split")])
def test_a_fused_projection_is_padded_part_by_part(fused: str) -> None:
    program = _assert_padded(_case(_Attention(3, fused=fused, p=0.2)), 2, "qkv out")
    assert program.param_placements["body.qkv.weight"] == S(0, (12, 12, 12), 3)
    header, body = program.code.split("\nclass ", 1)
    assert "S(0|12,12,12/3)" in body
    assert "S(i|a/n)" in header


@pytest.mark.parametrize("fused", ["split", slow("")])
def test_grouped_heads_are_padded_by_groups(fused: str) -> None:
    """Of 3 groups of 2 query heads on 4 ranks each has one, but for the last."""
    names = "qkv out" if fused else "q k v out"
    program = _assert_padded(_case(_Attention(6, 3, fused=fused)), 4, names)
    if fused:
        assert program.param_placements["body.qkv.weight"] == S(0, (24, 12, 12), 3)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [4, 8])
def test_fewer_key_heads_than_ranks(tp: int) -> None:
    """Keys are repeated before they are cut: query heads are padded one by one."""
    program = _assert_padded(_case(_Attention(6, 2)), tp, "q out")
    assert program.param_placements["body.q.weight"] == S(0, (24,), 6)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _softmax(q: Tensor, k: Tensor, bias: Tensor | float = 0.0, dim: int = -1) -> Tensor:
    return (q @ k.transpose(-1, -2) + bias).softmax(dim)


def _energy(q: Tensor) -> Tensor:
    """Positive for every query: (batch, heads, queries, 1)."""
    return q.square().mean(-1, keepdim=True)


def _later(q: Tensor) -> Tensor:
    """Keys that a query must not see: bool (queries, keys)."""
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)


def _slopes(q: Tensor) -> Tensor:
    """A bias for each head, as ALiBi has: (heads, 1, keys)."""
    heads, keys = q.shape[1], q.shape[2]
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=q.dtype, device=q.device)
    return slopes.view(-1, 1, 1) * torch.arange(keys, dtype=q.dtype, device=q.device)


def _own_masks(q: Tensor) -> Tensor:
    """Bool (heads, queries, keys): head i sees only what is at most i steps away."""
    steps = torch.arange(q.shape[2], device=q.device)
    distance = (steps.view(-1, 1) - steps).abs()
    return distance <= torch.arange(q.shape[1], device=q.device).view(-1, 1, 1)


_PADDED: dict[str, Callable[..., Tensor]] = {
    "fused, causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fused, biased": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _slopes(q)),
    "biased": lambda q, k, v: _softmax(q, k, _slopes(q)) @ v,
    "normed": lambda q, k, v: _softmax(_rms(q, 1e-6), F.layer_norm(k, k.shape[-1:])) @ v,
    "value shifted": lambda q, k, v: _softmax(q, k) @ (v + 1),
    "scaled, then masked": lambda q, k, v: (
        ((q @ k.transpose(-1, -2)) * _energy(q)).masked_fill(_later(q), -math.inf).softmax(-1) @ v
    ),
}
# Where a head of zeros would change the others, or be NaN.
_NOT_PADDED: dict[str, Callable[..., Tensor]] = {
    "softmax over heads": lambda q, k, v: _softmax(q, k, dim=1) @ v,
    "norm without eps": lambda q, k, v: _softmax(_rms(q, 0.0), k) @ v,
    "mean over heads": lambda q, k, v: _softmax(q, k - k.mean(1, keepdim=True)) @ v,
    "norm over heads": lambda q, k, v: F.layer_norm(
        (_softmax(q, k) @ v).transpose(1, -1), q.shape[1:2]
    ).transpose(1, -1),
    "masks of heads": lambda q, k, v: _softmax(q, k).masked_fill(~_own_masks(q), 0.0) @ v,
    "forbidden by heads": lambda q, k, v: (
        torch.where(_own_masks(q), q @ k.transpose(-1, -2), -math.inf).softmax(-1) @ v
    ),
    "fused, masks of heads": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, _own_masks(q)),
    "eps subtracted": lambda q, k, v: (
        _softmax(q * torch.add(_energy(q), 1e-12, alpha=-1).rsqrt(), k) @ v
    ),
    "power of a difference": lambda q, k, v: _softmax(q * (_energy(q) - 1e-12).pow(1.5), k) @ v,
    "masked, then scaled": lambda q, k, v: (
        ((q @ k.transpose(-1, -2)).masked_fill(_later(q), -math.inf) * _energy(q.detach())).softmax(
            -1
        )
        @ v
    ),
    "division": lambda q, k, v: _softmax(q / q.abs().sum(-1, keepdim=True), k) @ v,
}


@pytest.mark.parametrize("name", slow_but(["fused, causal"], _PADDED))
def test_cores_of_padded_heads(name: str) -> None:
    _assert_padded(_case(_Attention(3, core=_PADDED[name])), 2, "q k v out")


@pytest.mark.parametrize("name", slow_but(["norm without eps"], _NOT_PADDED))
def test_heads_that_zeros_would_disturb(name: str) -> None:
    """A padded operand of such an operator is gathered, without the padding, in front of it."""
    parity.assert_parity(_case(_Attention(3, core=_NOT_PADDED[name])), tp=2)


@pytest.mark.parametrize(
    "placement", [S(0, (12,), 3), S(1, (6, 3, 3), 3), S(0, (12, 12), 4), S(1, (12,), 2)], ids=str
)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_of_units(placement: Placement, world_size: int) -> None:
    size = sum(placement.segments)
    full = torch.arange(size * 5.0).view((size, 5) if placement.dim == 0 else (5, size))
    assert Placement.parse(str(placement)) == placement
    ranks = range(world_size)
    parts = [local_part(full, placement, rank, world_size) for rank in ranks]
    shape = placement.local_shape(tuple(full.shape), world_size)
    assert all(part.shape == shape for part in parts)
    assert torch.equal(join_parts(parts, placement), full)
    stored = [stored_part(full, placement, rank, world_size) for rank in ranks]
    for rank, (chunk, part) in enumerate(zip(stored, parts, strict=True)):
        assert chunk.is_contiguous()
        assert chunk.shape == stored_shape(tuple(full.shape), placement, rank, world_size)
        assert torch.equal(padded_part(chunk, placement, world_size), part)
    assert sum(chunk.numel() for chunk in stored) == full.numel()


def _model() -> nn.Module:
    torch.manual_seed(3)
    return _Loss(_Attention(3, fused="split", depth=5)).double()


def _input(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, 16, dtype=torch.float64, generator=generator).requires_grad_()


def _train(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(3):
        loss = module(_input(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _on_ranks(folder: str) -> dict[str, Any]:
    module = sp_compiler.compile(_model(), tp=2, example_inputs=((_input(),), {}))
    found: dict[str, Any] = {}
    weights = dict(module.named_parameters())
    found["local"] = {name: tuple(p.to_local().shape) for name, p in weights.items()}
    module(_input(7)).backward()
    found["weights"] = {name: p.full_tensor().detach().clone() for name, p in weights.items()}
    found["grads"] = {name: p.grad.full_tensor().clone() for name, p in weights.items()}
    norm = nn.utils.get_total_norm([p.grad for p in weights.values() if p.grad is not None])
    found["norm"] = norm.full_tensor().item()
    module.zero_grad()

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found["losses"] = _train(module, optimizer)
    state = {"m": module.state_dict(), "o": optimizer.state_dict()["state"]}
    checkpoint.save(state, checkpoint_id=folder)
    found["state"] = {name: value.full_tensor() for name, value in state["m"].items()}
    other = sp_compiler.compile(_model(), tp=2, example_inputs=((_input(),), {}))
    loaded = {"m": other.state_dict()}
    checkpoint.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["m"])
    found["loaded"] = (other(_input(9)).item(), module(_input(9)).item())
    return found


@pytest.mark.slow
def test_two_ranks_train_three_heads_as_one(tmp_path: Path) -> None:
    model = _model()
    model(_input(7)).backward()
    weights = dict(model.named_parameters())
    grads = {name: p.grad.clone() for name, p in weights.items()}
    before = {name: p.detach().clone() for name, p in weights.items()}
    model.zero_grad()
    losses = _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for rank, found in enumerate(run_on_ranks(2, _on_ranks, str(tmp_path))):
        heads = 2 - rank
        assert found["local"]["body.qkv.weight"] == (3 * heads * 5, 16)
        assert found["local"]["body.out.weight"] == (16, heads * 5)
        torch.testing.assert_close(found["weights"], before, rtol=0, atol=0)
        torch.testing.assert_close(found["grads"], grads, rtol=1e-9, atol=1e-12)
        assert found["norm"] == pytest.approx(
            torch.stack([grad.norm() for grad in grads.values()]).norm().item(), rel=1e-9
        )
        torch.testing.assert_close(found["losses"], losses, rtol=1e-9, atol=0)
        torch.testing.assert_close(found["state"], dict(model.state_dict()), rtol=1e-8, atol=1e-9)
        assert found["loaded"][0] == pytest.approx(found["loaded"][1], rel=1e-12)


@pytest.mark.parametrize("fused", ["view", *map(slow, ("", "split"))])
def test_the_plan_names_padded_heads(fused: str) -> None:
    found = sp_compiler.plan(_Loss(_Attention(3, fused=fused)), ((_input().float(),), {}), tp=2)
    assert found.notes == (
        "attention in body of Model runs on 4 heads: its 3 are not divisible by 2 ranks and are "
        "padded",
    )
    assert not any("attention core" in item.share for item in found.costly_fallbacks)


@pytest.mark.parametrize(
    ("core", "why"),
    [
        ("fused, causal", "padding them to 4 is estimated to cost more time and memory than it"),
        ("fused, masks of heads", "padding them could be wrong here, for example with a mask"),
    ],
)
@pytest.mark.parametrize("fused", ["split", slow("")])
def test_the_warning_says_why_heads_are_not_padded(core: str, why: str, fused: str) -> None:
    """With 3 wide heads a third more of each weight costs more than a replicated attention."""
    cores = _PADDED | _NOT_PADDED
    model = _Loss(_Attention(3, fused=fused, core=cores[core], width=48, depth=16))
    x = torch.randn(2, 6, 48).requires_grad_()
    found = sp_compiler.plan(model, ((x,), {}), tp=2)
    assert not found.notes
    (item,) = (item for item in found.costly_fallbacks if "attention core" in item.share)
    assert f"its 3 heads are not divisible by 2 ranks, and {why}" in item.reason
    assert item.advice == "Choose a tp that divides 3, or a number of heads that is divisible by 2"
