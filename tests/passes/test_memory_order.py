"""Kernels that read memory in order get it in order, whatever the region before them returns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import sp_compiler.compiler
from sp_compiler.passes.memory_order import _READ_IN_ORDER, order_memory
from sp_compiler.rules.registry import ROWS
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.helpers import parity
from tests.helpers.op_samples import calls as op_samples
from tests.helpers.operator_call import Call
from tests.helpers.regions import region_of
from tests.helpers.torch_versions import GROUP_NORMS_READ_STRIDES

aten = torch.ops.aten


class Normed(nn.Module):
    """A group norm of what the region is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x).tanh()
        return y


class Attention(nn.Module):
    """Attention of its input, or of a projection of it, whose memory a trace knows."""

    def __init__(self, *, projected: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1) + 1)
        self.project = nn.Linear(4, 4) if projected else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2) * cos
        q = q * self.scale
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def _calls(joint: JointGraph, target: object) -> list[list[str]]:
    """The operands of all calls of ``target``, a copy as ``copy of x``."""

    def name(node: object) -> str:
        copied = isinstance(node, torch.fx.Node) and node.target is aten.clone.default
        return f"copy of {node.args[0]}" if copied else str(node)  # type: ignore[attr-defined]

    return [
        [name(operand) for operand in node.args if isinstance(operand, torch.fx.Node)]
        for node in joint.graph.nodes
        if node.target is target
    ]


def test_operands_that_may_lie_otherwise_are_copied_once() -> None:
    joint = trace_joint(region_of(Normed(), torch.randn(2, 4, 5, 5)))
    norm, backward = aten.native_group_norm.default, aten.native_group_norm_backward.default
    (before,) = _calls(joint, norm)
    assert before == ["x", "norm_weight", "norm_bias"]
    order_memory(joint)
    assert _calls(joint, norm) == [["copy of x", *before[1:]]]
    # The gradient of the region's output is contiguous, and so is what is computed from it.
    (after,) = _calls(joint, backward)
    assert after[1] == "copy of x"
    assert not after[0].startswith("copy")
    copies = [node for node in joint.graph.nodes if node.target is aten.clone.default]
    assert len(copies) == 1
    order_memory(joint)
    assert copies == [node for node in joint.graph.nodes if node.target is aten.clone.default]


@pytest.mark.parametrize("projected", [False, True])
def test_what_a_product_returns_is_not_copied(projected: bool) -> None:
    module = Attention(projected=projected)
    joint = trace_joint(region_of(module, torch.randn(2, 3, 4), torch.randn(3, 2)))
    before = len(joint.graph.nodes)
    order_memory(joint)
    assert (len(joint.graph.nodes) == before) is projected
    joint.graph.lint()


class Blocks(nn.Module):
    """Blocks that are given a permuted tensor."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 4), nn.ModuleList(blocks)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = self.embed(x).permute(0, -1, *range(1, x.dim() - 1))
        for block in self.blocks:
            x = block(x, *others)
        return (x * torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)).square().mean()


def _error(model: nn.Module, *args: Tensor) -> float:
    model = model.double()
    eager = copy.deepcopy(model)
    eager(*args).backward()
    names = ("x", "others")
    case = parity.make_case(_Named(model), dict(zip(names, args, strict=False)))
    step = parity.simulate(case, parity.compiled(case, tp=2))
    grads = {name.removeprefix("model."): grad for name, grad in step.grads.items()}
    true = {name: value.grad for name, value in eager.named_parameters()}
    return parity.gradient_error(grads, true)


class _Named(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, others: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(x) if others is None else self.model(x, others)
        return loss


def _no_copies(joint: JointGraph) -> None:
    pass


def test_group_norms_of_channels_last() -> None:
    torch.manual_seed(0)
    model = Blocks(Normed())
    x = torch.randn(2, 5, 5, 4, dtype=torch.float64)
    assert _error(model, x) < 1e-10
    if not GROUP_NORMS_READ_STRIDES:
        with mock.patch.object(sp_compiler.compiler, "order_memory", _no_copies):
            assert _error(model, x) > 1e-2


class Expanded(Normed):
    """What is expanded has all dims, and no say in how they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale.exp().expand(x.shape) * x)


@torch.library.custom_op("sp_compiler_tests::numbered", mutates_args=())
def _numbered(x: Tensor) -> Tensor:
    """Each number times its place in memory, as a kernel that does not look at strides counts."""
    places = torch.arange(x.numel(), dtype=x.dtype)
    return (x.as_strided((x.numel(),), (1,)) * places).view(x.shape)


@_numbered.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _backward_of_numbered(context: Any, grad: Tensor) -> Tensor:
    return _numbered(grad.contiguous())


_numbered.register_autograd(_backward_of_numbered)


class Own(nn.Module):
    """An operator of the user's, and the copy that it needs."""

    def forward(self, x: Tensor) -> Tensor:
        return _numbered(x.contiguous()) / x.numel()


@pytest.mark.parametrize("kind", [Expanded, Own])
def test_kernels_behind(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 5, 4, dtype=torch.float64)
    model = Blocks(kind(), kind())
    assert _error(model, x) < 1e-10
    if kind is Own or not GROUP_NORMS_READ_STRIDES:
        with mock.patch.object(sp_compiler.compiler, "order_memory", _no_copies):
            assert _error(model, x) > 1e-2


def test_weights_in_channels_last() -> None:
    """They decide how results and gradients of convolutions lie in memory."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3)
    model: nn.Module = nn.Sequential(*layers).double()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64)
    x = torch.randn(2, 3, 10, 10, dtype=torch.float64)
    eager = copy.deepcopy(model)
    (eager(x) * weights).sum().backward()
    compiled = sp_compiler.compile(model, tp=1)
    (compiled(x) * weights).sum().backward()
    grads = {name: value.grad for name, value in compiled.named_parameters()}
    true = {name: value.grad for name, value in eager.named_parameters()}
    assert parity.gradient_error(grads, true) < 1e-10


def test_attention_of_what_the_region_before_permuted() -> None:
    torch.manual_seed(0)
    x, cos = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    assert _error(Blocks(Attention()), x, cos) < 1e-10


def _reversed(x: Tensor) -> Tensor:
    """The same numbers with all dims in the other order in memory."""
    dims = [*range(x.dim())][::-1]
    return x.permute(dims).contiguous().permute(dims)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of operators that are deprecated, or of few samples
def test_no_other_operator_reads_in_order() -> None:
    """Numbers do not depend on strides, or the operator refuses them."""
    wrong = set()
    for name in ROWS:
        for target in op_samples.overloads(name):
            if target not in op_samples.NEED_GPU and not _READ_IN_ORDER.get(target):
                wrong |= {str(target) for call in _calls_of(target) if _reads_in_order(call)}
    assert wrong == set()


def _calls_of(target: torch._ops.OpOverload) -> list[Call]:
    # Ours run on ranks; the others return what memory holds.
    no_numbers = target.namespace == "sp_compiler" or target._schema.name in (
        "aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter", "aten::empty_like",
        "aten::new_empty", "aten::new_empty_strided",
    )  # fmt: skip
    return [] if no_numbers else list(op_samples.calls(target, 2, 2))


def _reads_in_order(call: Call) -> bool:
    torch.manual_seed(0)
    true = call.target(*call.args, **call.kwargs)
    leaves, structure = pytree.tree_flatten(call.args)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # Kernels may ask one operand for the strides of all.
    return any(
        not _is_equal(call, true, structure.unflatten(_with_reversed(leaves, chosen)))
        for chosen in ([tensors] if len(tensors) < 2 else [tensors, *([each] for each in tensors)])
    )


def _with_reversed(leaves: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    return [_reversed(leaf) if index in chosen else leaf for index, leaf in enumerate(leaves)]


def _is_equal(call: Call, true: Any, args: Sequence[Any]) -> bool:
    torch.manual_seed(0)
    try:
        actual = call.target(*args, **call.kwargs)
    except RuntimeError:
        return True
    return all(
        torch.allclose(one, other, 1e-6, 1e-7, equal_nan=True)
        for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(true), strict=True)
        if isinstance(other, Tensor)
    )
