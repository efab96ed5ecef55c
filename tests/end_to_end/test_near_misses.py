"""Models that differ from a plain one in a single argument, whose loss would change numbers.

Each is small and has what the argument acts on: an ignored label among the labels, a padding token
among the tokens. Two ranks, float64, outputs and all gradients against one device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from sp_compiler.base.placement import S
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.hints import Hint
from sp_compiler.ir.program import Region
from tests.helpers import parity
from tests.helpers.normalized import randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_WIDTH = 8
_VOCABULARY = 12


class _Layer(nn.Module):
    """Attention and a gate between two norms."""

    def __init__(self, eps: float = 1e-5, scale: float | None = None, slope: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH, eps=eps)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.scale, self.slope = scale, slope

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        core = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return x + F.leaky_relu(self.out(core.transpose(1, 2).flatten(2)), self.slope)


class _Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)  # so that the inputs of both layers require a gradient
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def _parity(
    model: nn.Module, hints: dict[str, Hint] | None = None, **inputs: Tensor
) -> CompiledProgram:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    case = parity.make_case(model.double(), inputs, hints=hints)
    return parity.assert_parity(case, tp=2)


def _layer_regions(compiled: CompiledProgram) -> list[Region]:
    return [call.region for call in compiled.program.calls if call.path.startswith("layers")]


@pytest.mark.parametrize("options", [{"eps": 0.5}, {"scale": 1.5}, {"slope": 0.7}], ids=str)
def test_layers_that_differ_in_one_number(options: dict[str, float]) -> None:
    compiled = _parity(_Stack(_Layer(), _Layer(**options)), x=randn(2, 4, _WIDTH))
    first, second = _layer_regions(compiled)
    assert first is not second


def test_layers_that_agree() -> None:
    """Else what the others differ in would prove nothing."""
    first, second = _layer_regions(_parity(_Stack(_Layer(), _Layer()), x=randn(2, 4, _WIDTH)))
    assert first is second


class _Language(nn.Module):
    """Tokens to a loss; both tables are sharded by the vocabulary."""

    def __init__(self, loss: Callable[..., Tensor], padding_idx: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=padding_idx)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.tokens(ids).tanh()).flatten(0, 1), labels.flatten())


_IDS = torch.tensor([[0, 1, 5, 6, 11], [7, 1, 1, 6, 3]])
# Both ranks hold labels that are ignored, and some that are not.
_LABELS = torch.tensor([[1, 0, 5, 6, 11], [7, 6, 0, 1, 3]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore", [0, 6, 11])
def test_an_ignored_class_of_either_rank(ignore: int, reduction: str) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, ignore_index=ignore, reduction=reduction)

    compiled = _parity(_Language(loss), ids=_IDS, labels=_LABELS)
    assert compiled.param_placements["head.weight"].is_sharded
    assert "vocab_nll" in compiled.code


def test_losses_of_rows_of_which_one_is_ignored() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        rows = F.cross_entropy(logits, labels, ignore_index=6, reduction="none")
        return (rows * torch.arange(1.0, 11.0, dtype=torch.float64)).sum()

    assert "vocab_nll" in _parity(_Language(loss), ids=_IDS, labels=_LABELS).code


@pytest.mark.parametrize("padding", [0, 1, 6, 11, -1])
def test_a_padding_token_of_either_rank_has_no_gradient(padding: int) -> None:
    model = _Language(F.cross_entropy, padding_idx=padding)
    hints: dict[str, Hint] = {"tokens.weight": Shard(0)}
    compiled = _parity(model, hints, ids=_IDS, labels=_LABELS)
    assert compiled.param_placements["tokens.weight"] == S(0)


class _Sum(nn.Module):
    """A sum with a factor, of two products."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(_WIDTH, 16), nn.Linear(_WIDTH, 16)
        self.down = nn.Linear(16, _WIDTH)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.combine(self.up(x), self.gate(x)).tanh()).sum()


@pytest.mark.parametrize(
    "combine",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: torch.sub(x, y, alpha=3),
        lambda x, y: torch.rsub(x, y, alpha=2),
        lambda x, y: torch.add(x, 0.5, alpha=2) * y,
        lambda x, y: torch.div(x, y, rounding_mode="floor") + y,
        lambda x, y: torch.addcmul(x, x, y, value=0.5),
        lambda x, y: torch.addcdiv(x, x, y + 9, value=0.5),
        lambda x, y: torch.lerp(x, y, 0.25),
    ],
    ids=["add", "sub", "rsub", "add a number", "floor", "addcmul", "addcdiv", "lerp"],
)
def test_operators_with_a_factor(combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    _parity(_Sum(combine), x=randn(2, 4, _WIDTH))


class _ComputedWeight(nn.Module):
    """A hidden width that does not divide, and a weight that is not zero where it is padded."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 7, bias=False)
        self.down = nn.Parameter(torch.empty(_WIDTH, 7))
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        return F.linear((self.up(x) + 1).sigmoid(), self.weigh(self.down)).square().sum()


@pytest.mark.parametrize(
    "weigh", [torch.exp, lambda w: w + 1, torch.sigmoid, lambda w: w.float().double().exp()]
)
def test_a_computed_weight_over_a_padded_width(weigh: Callable[[Tensor], Tensor]) -> None:
    _parity(_ComputedWeight(weigh), x=randn(2, 4, _WIDTH))


class _PaddedWidth(nn.Module):
    """Something on a width that does not divide; ranks hold zeros or anything behind it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(_WIDTH, 7, bias=False), nn.Linear(_WIDTH, 7, bias=False)
        self.down = nn.LazyLinear(_WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self.gate(x))).square().sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x / y,
        lambda x, y: x.square().rsqrt() * y,
        lambda x, y: (x + 1).mean(-1, keepdim=True) * y,
        lambda x, y: (x + 1).sum(-1, keepdim=True) * y,
        lambda x, y: x.softmax(-1) * y,
        lambda x, y: (x - 9).amax(-1, keepdim=True) + y,
        lambda x, y: (x + 1).flip(-1) * y,
        lambda x, y: (x + 1).cumsum(-1) * y,
        lambda x, y: torch.cat([x + 1, y], -1),
        lambda x, y: F.pad(x + 1, (1, 0)),
        lambda x, y: F.layer_norm(x + 1, (7,)) * y,
        lambda x, y: (x + 1) @ y.transpose(-1, -2),
        lambda x, y: (x + 1)[..., 1:],
        lambda x, y: (x + 1).reshape(2, 14, 2),
    ],
    ids=[
        *("quotient", "root", "mean", "sum", "softmax", "largest", "flip", "running sum", "joined"),
        *("padded again", "norm", "product", "slice", "reshape"),
    ],
)
def test_padding_behind_a_width(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = _PaddedWidth(function), randn(2, 4, _WIDTH)
    model(x.float())  # so that lazy widths are known
    _parity(model, x=x)


class _Channels(nn.Module):
    """A linear layer before and behind something that works on channels in dim 1."""

    def __init__(self, channels: nn.Module) -> None:
        super().__init__()
        self.up, self.channels = nn.Linear(_WIDTH, 16), channels
        self.down = nn.LazyLinear(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.channels(self.up(x).transpose(1, 2)).transpose(1, 2)
        return self.down(hidden.tanh()).square().sum()


@pytest.mark.parametrize(
    "channels",
    [
        nn.GroupNorm(4, 16),
        nn.GroupNorm(1, 16),
        nn.GroupNorm(16, 16, affine=False),
        nn.Conv1d(16, 8, 3, groups=4),
        nn.ConvTranspose1d(16, 8, 3),
        nn.ConvTranspose1d(16, 8, 3, groups=4),
    ],
    ids=str,
)
def test_groups_of_channels(channels: nn.Module) -> None:
    model, x = _Channels(channels), randn(2, 4, _WIDTH)
    model(x.float())  # so that lazy widths are known
    _parity(model, x=x)
