"""Hand-made regions for tests of everything after sharding, and a reference that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from sp_compiler.ir.program import RefKind, Region
from sp_compiler.ops.communicator import Communicator

sp = torch.ops.sp_compiler
TP1 = Communicator(None, 0, 1)


class Gpt(nn.Module):
    """The paper's block on flat rows, as Megatron shards it (every conversion is there)."""

    def __init__(
        self,
        b: int,
        s: int,
        h: int,
        a: int,
        *,
        dtype: torch.dtype = torch.float64,
        masks: str = "none",
        attention: str = "explicit",
    ) -> None:
        super().__init__()
        self.dims, self.masks, self.attention = (b, s, a, h // a), masks, attention
        self.ln_1, self.ln_2 = nn.LayerNorm(h, dtype=dtype), nn.LayerNorm(h, dtype=dtype)
        self.qkv, self.proj = nn.Linear(h, 3 * h, dtype=dtype), nn.Linear(h, h, dtype=dtype)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h, dtype=dtype), nn.Linear(4 * h, h, dtype=dtype)
        self.register_buffer("causal", torch.ones(s, s).tril() == 0)

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        y = sp.convert(self.ln_1(x), "S(0)", "R", 1)
        y = self.drop(self._reduced(self._attention(y, seed), self.proj), seed, 1)
        x = x + y
        y = sp.convert(self.ln_2(x), "S(0)", "R", 1)
        y = F.gelu(self.fc1(y), approximate="tanh")
        return x + self.drop(self._reduced(y, self.fc2), seed, 2)

    def _reduced(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return sp.convert(F.linear(x, linear.weight), "P", "S(0)", 1) + linear.bias

    def _attention(self, x: Tensor, seed: Tensor) -> Tensor:
        b, s, a, d = self.dims
        q, k, v = self.qkv(x).view(b, s, 3 * a * d).split(a * d, dim=2)
        q, k, v = (part.view(b, s, a, d).transpose(1, 2) for part in (q, k, v))
        if self.attention == "fused":
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / d**0.5
            scores = scores.masked_fill(self.causal, float("-inf"))
            context = torch.matmul(self.drop(scores.softmax(-1), seed, 0), v)
        return context.transpose(1, 2).reshape(b * s, a * d)

    def drop(self, x: Tensor, seed: Tensor, site: int) -> Tensor:
        if self.masks == "stored":
            return x * sp.dropout_mask(x, seed, 0.1, site, 0, 1) * (1 / 0.9)
        return sp.dropout(x, seed, 0.1, site, 0, 1) if self.masks == "regenerate" else x


class Mlp(nn.Module):
    """A gated MLP on gathered rows, without biases, with the residual around it."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(h, 2 * h, bias=False), nn.Linear(h, 2 * h, bias=False)
        self.down = nn.Linear(2 * h, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = sp.convert(x, "S(0)", "R", 1)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + sp.convert(y, "P", "S(0)", 1)


def region_of(
    module: nn.Module,
    *args: Tensor,
    kinds: Sequence[RefKind] | None = None,
    requires_grad: Sequence[bool] | None = None,
    name: str = "",
) -> Region:
    """Capture ``module`` with fake ``args``; parameters and buffers become inputs after the values.

    ``kinds`` and ``requires_grad`` are those of ``args``: by default "seed" for a number of type
    int64, else "call", and every floating point one needs a gradient.
    """
    exported = torch.export.export(module, args, strict=False)
    signature = exported.graph_signature
    graph_module = fx.GraphModule({}, exported.graph)
    default: list[RefKind] = ["seed" if arg.dtype == torch.int64 else "call" for arg in args]
    grads = requires_grad or [arg.is_floating_point() for arg in args]
    values = zip(kinds or default, grads, strict=True)
    names: list[str] = []
    all_kinds: list[RefKind] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        key, grad = node.name, False
        kind: RefKind = "buffer"
        if node.name in signature.inputs_to_parameters:
            key = signature.inputs_to_parameters[node.name]
            kind, grad = "param", exported.state_dict[key].requires_grad
        elif node.name in signature.inputs_to_buffers:
            key = signature.inputs_to_buffers[node.name]
        else:
            kind, grad = next(values)
        names.append(key)
        all_kinds.append(kind)
        node.meta["requires_grad"] = grad
    return Region(name or type(module).__name__, graph_module, tuple(all_kinds), tuple(names))


def gpt_region(b: int, s: int, h: int, a: int, *, dtype: torch.dtype, **options: Any) -> Region:
    """A :class:`Gpt` of any size: nothing is allocated."""
    with FakeTensorMode():
        module = Gpt(b, s, h, a, dtype=dtype, **options)
        x, seed = torch.empty(b * s, h, dtype=dtype), torch.zeros((), dtype=torch.int64)
        return region_of(module, x, seed, name="GptBlock")


def random_inputs(region: Region) -> list[Tensor]:
    """Values for the region's inputs: small normal numbers, lower indices than 7, random masks."""
    generator = torch.Generator().manual_seed(0)
    return [_random(node, generator) for node in region.placeholders]


def _random(node: fx.Node, generator: torch.Generator) -> Tensor:
    value = node.meta["val"]
    shape = tuple(value.shape)
    if value.dtype == torch.bool:
        return torch.ones(shape).tril() == 0
    if not value.is_floating_point():
        return torch.randint(0, 7, shape, generator=generator, dtype=value.dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) / 4
    return x.to(value.dtype).requires_grad_(bool(node.meta["requires_grad"]))


class Reference(fx.Interpreter):
    """Runs a region as it stands on one rank; autograd differentiates it."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "namespace", "") != "sp_compiler":
            return super().call_function(target, args, kwargs)
        name = target.__name__.partition(".")[0]
        if name == "convert":
            return args[0]
        if name == "dropout":  # the runtime's own has no autograd
            return args[0] * TP1.dropout_mask(*args) * (1 / (1 - args[2]))
        if name == "vocab_embedding":
            return F.embedding(args[1], args[0])
        if name == "vocab_nll":
            logits, ids, ignore, *_ = args
            loss = F.cross_entropy(logits, ids, ignore_index=ignore, reduction="none")
            return loss, logits.logsumexp(-1).detach()
        return getattr(TP1, name)(*args)


def reference(region: Region, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs of the composite graph, differentiable."""
    return tuple(Reference(region.module).run(*inputs))
