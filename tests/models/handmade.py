"""A compiled program written by hand: blocks ``x + relu(x * scale @ up.T + bias) @ down.T``.

Tokens are sharded between the products, ``up`` is column-parallel, ``down`` row-parallel, ``scale``
is stored whole and used as R. The loss is the mean of squares of the last ``x``, which is returned
whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.placement import I, Placement, R, S
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Call, Program, Ref, RefKind, Region


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(hidden))
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x * self.scale).relu())


class Model(nn.Module):
    """The model that the handmade program stands for; ``x`` is (tokens, hidden)."""

    def __init__(self, hidden: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.config = {"hidden": hidden}
        self.blocks: Any = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        self.steps.add_(1)
        return {"loss": (x * x).mean(), "last": x}


class EnterCode:
    @staticmethod
    def forward(tp: Any, x: Tensor, steps: Tensor) -> Any:
        return (tp.shard(x, "I", "S(0)"), steps + 1), ()

    @staticmethod
    def backward(tp: Any, saved: Any, grad: Tensor) -> Any:
        return tp.all_gather(grad, "S(0)", "I"), None


class BlockCode:
    @staticmethod
    def forward(tp: Any, scale: Tensor, up: Tensor, bias: Tensor, down: Tensor, x: Tensor) -> Any:
        whole = tp.all_gather(x * scale, "S(0)", "R")
        active = torch.nn.functional.linear(whole, up, bias).relu()
        out = x + tp.reduce_scatter(active @ down.t(), "P", "S(0)")
        return (out,), (scale, up, down, x, active)

    @staticmethod
    def backward(tp: Any, saved: Any, grad: Tensor) -> Any:
        scale, up, down, x, active = saved
        whole_grad = tp.all_gather(grad, "S(0)", "R")
        grad_down = whole_grad.t() @ active
        grad_active = (whole_grad @ down) * (active > 0)
        whole = tp.all_gather(x * scale, "S(0)", "R")
        grad_up, grad_bias = grad_active.t() @ whole, grad_active.sum(0)
        grad_scaled = tp.reduce_scatter(grad_active @ up, "P", "S(0)")
        grad_scale = (grad_scaled * x).sum(0)
        return grad_scale, grad_up, grad_bias, grad_down, grad + grad_scaled * scale


class LeaveCode:
    @staticmethod
    def forward(tp: Any, x: Tensor) -> Any:
        whole = tp.all_gather(x, "S(0)", "I")
        return ((whole * whole).mean(), whole), (whole,)

    @staticmethod
    def backward(tp: Any, saved: Any, grad_loss: Tensor, grad_whole: Tensor) -> Any:
        (whole,) = saved
        grad = grad_whole + whole * (2 / whole.numel()) * grad_loss
        return (tp.shard(grad, "I", "S(0)"),)


def _region(
    name: str, kinds: list[RefKind], names: str, inputs: list[Placement], outputs: list[Placement]
) -> Region:
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    return Region(
        name,
        module,
        tuple(kinds),
        tuple(names.split()),
        tuple(inputs),
        tuple(outputs),
    )


def handmade(world_size: int, layers: int = 2) -> CompiledProgram:
    """The program of :class:`Model` for ``world_size`` ranks."""
    enter = _region("Enter", ["input", "buffer"], "x steps", [I, I], [S(0), I])
    block = _region(
        "Block",
        ["param", "param", "param", "param", "call"],
        "scale up.weight up.bias down.weight x",
        [R, S(0), S(0), S(1), S(0)],
        [S(0)],
    )
    rows = 8, 4  # of the input
    block = replace(block, input_shapes=(None,) * 4 + (rows,), output_shapes=(rows,))
    leave = _region("Leave", ["call"], "x", [S(0)], [I, I])
    calls = [Call(enter, "", (Ref("input", index=0), Ref("buffer", "steps")))]
    placements = {}
    for layer in range(layers):
        path = f"blocks.{layer}"
        params = [Ref("param", f"{path}.{name}") for name in block.input_names[:4]]
        stored = [I, *block.input_placements[1:4]]
        placements.update({ref.name: where for ref, where in zip(params, stored, strict=True)})
        calls.append(Call(block, path, (*params, Ref("call", index=layer))))
    calls.append(Call(leave, "", (Ref("call", index=layers),)))
    last = len(calls) - 1
    _, spec = pytree.tree_flatten({"loss": 0, "last": 0})
    program = Program(
        calls,
        [Ref("call", index=last), Ref("call", index=last, output=1)],
        spec,
        mutated_buffers={"steps": Ref("call", index=0, output=1)},
    )
    return CompiledProgram(
        program,
        {"Enter": EnterCode(), "Block": BlockCode(), "Leave": LeaveCode()},
        placements,
        world_size,
        differentiable={"Enter": (True, False), "Block": (True,), "Leave": (True, True)},
    )
