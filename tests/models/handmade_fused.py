"""A handmade program with a fused weight, dropout, and an output that stays sharded.

``y = dropout(x @ fused.weight.T)``; the weight is sharded by segments of its rows, ``y`` is
returned sharded on its columns together with the mean of its squares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.placement import I, S
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Call, Program, Ref, Region


class FusedModel(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.fused: Any = nn.Linear(4, rows, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fused(x)
        return (y * y).mean(), y


class FusedCode:
    def __init__(self, placement: str, world_size: int, p: float) -> None:
        self.placement = placement
        self.world_size = world_size
        self.p = p

    def _drop(self, tp: Any, x: Tensor, seed: Tensor) -> Tensor:
        return tp.dropout(x, seed, self.p, 0, 1, self.world_size) if self.p else x

    def forward(self, tp: Any, weight: Tensor, x: Tensor, seed: Tensor) -> Any:
        columns = self.placement.replace("S(0", "S(1")
        whole = tp.all_gather(x @ weight.t(), columns, "I")
        y = self._drop(tp, tp.shard(whole, "I", "S(1)"), seed)
        total = tp.all_reduce((y * y).sum(), "P", "I")
        return (total / (y.numel() * self.world_size), y), (x, y, seed)

    def backward(
        self, tp: Any, saved: Any, grad_loss: Tensor, grad_y: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, y, seed = saved
        grad = grad_y + y * (2 / (y.numel() * self.world_size)) * grad_loss
        columns = self.placement.replace("S(0", "S(1")
        whole = tp.all_gather(self._drop(tp, grad, seed), "S(1)", "I")
        return tp.shard(whole, "I", columns).t() @ x, None, None


def handmade_fused(segments: tuple[int, ...], world_size: int, p: float = 0.0) -> CompiledProgram:
    where = S(0, segments)
    region = Region(
        "Fused",
        torch.fx.GraphModule({}, torch.fx.Graph()),
        ("param", "input", "seed") if p else ("param", "input", "constant"),
        ("fused.weight", "x", "seed"),
        (where, I, I),
        (I, S(1)),
    )
    last = Ref("seed") if p else Ref("constant", "none")
    call = Call(region, "", (Ref("param", "fused.weight"), Ref("input", index=0), last))
    program = Program(
        [call],
        [Ref("call", index=0), Ref("call", index=0, output=1)],
        pytree.tree_flatten((0, 0))[1],
        constants={"none": torch.zeros(())},
    )
    return CompiledProgram(
        program,
        {"Fused": FusedCode(str(where), world_size, p)},
        {"fused.weight": where},
        world_size,
        differentiable={"Fused": (True, True)},
    )
