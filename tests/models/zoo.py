"""Tiny models of many kinds and inputs for them, for every test that needs a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import GPTConfig, PlainGPT
from tests.helpers.slow import slow_but

VOCAB = 128
_HIDDEN = 32
_HEADS = 4
_MAX_LENGTH = 64

Kwargs = dict[str, Any]
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
_INPUTS: dict[str, Callable[..., Kwargs]] = {}


def names() -> list[str]:
    """Every model of the zoo, in a fixed order."""
    return list(_BUILDERS)


def cases(*fast: str) -> list[Any]:
    """Test parameters of every model: slow tests, but for those that are named."""
    return slow_but(fast, names())


def build(
    name: str,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **overrides: Any,
) -> nn.Module:
    """The model ``name`` in train mode with random parameters.

    Args:
        name: one of :func:`names`.
        dropout: every dropout probability of the model.
        dtype: of parameters and floating point buffers.
        seed: of the parameters, which depend on nothing else.
        overrides: ``layers`` and fields of the model's configuration (``attn_implementation``...).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[name](dropout=dropout, **overrides)
    if any(parameter.is_meta for parameter in model.parameters()):
        return model.to(dtype).train()
    randomise(model, seed)
    return model.to(dtype).train()


def inputs(name: str, batch: int = 2, seq: int = 12, seed: int = 0) -> Kwargs:
    """Keyword arguments of ``name``'s forward; ViT ignores ``seq``."""
    generator = torch.Generator().manual_seed(seed)
    return _INPUTS[name](batch, seq, generator)


def loss_of(output: Any) -> Tensor:
    """A scalar to differentiate: the model's loss, or the mean square of its first output."""
    first = output if isinstance(output, Tensor) else output[0]
    return first if first.ndim == 0 else first.square().mean()


def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter values of order one, so that no gradient is small by initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                parameter.copy_(noise / math.sqrt(min(parameter.shape[-1], _HIDDEN)))
            else:
                parameter.add_(0.1 * noise)


def _ids(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=generator)


def _labels(batch: int, seq: int, generator: torch.Generator) -> Tensor:
    """Random targets, some of them ignored."""
    labels = _ids(batch, seq, generator)
    return labels.masked_fill(torch.rand((batch, seq), generator=generator) < 0.2, -100)


def _token_inputs(batch: int, seq: int, generator: torch.Generator) -> Kwargs:
    return {"input_ids": _ids(batch, seq, generator), "labels": _labels(batch, seq, generator)}


def _ids_only(batch: int, seq: int, generator: torch.Generator) -> Kwargs:
    return {"input_ids": _ids(batch, seq, generator)}


def _register(
    name: str, make_inputs: Callable[..., Kwargs], **defaults: Any
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    def add(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        _BUILDERS[name] = lambda **kwargs: builder(**{**defaults, **kwargs})
        _INPUTS[name] = make_inputs
        return builder

    return add


def _override(overrides: Kwargs, **defaults: Any) -> Kwargs:
    return {**defaults, **overrides}


def _huggingface(model_class: type, config: Any, attn_implementation: str) -> nn.Module:
    config._attn_implementation = attn_implementation
    return model_class(config)


@_register("gpt2", _token_inputs)
@_register("gpt2_logits", _ids_only)
def _gpt2(
    dropout: float, layers: int = 2, attn_implementation: str = "sdpa", **overrides: Any
) -> nn.Module:
    fields = _override(
        overrides,
        vocab_size=VOCAB, n_positions=_MAX_LENGTH, n_embd=_HIDDEN, n_layer=layers, n_head=_HEADS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
        loss_type="ForCausalLM", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config = transformers.GPT2Config(**fields)
    return _huggingface(transformers.GPT2LMHeadModel, config, attn_implementation)


@_register("llama", _token_inputs)
@_register("llama_gqa8", _token_inputs, num_attention_heads=8, num_key_value_heads=4)
@_register("llama_logits", _ids_only)
def _llama(
    dropout: float, layers: int = 2, attn_implementation: str = "sdpa", **overrides: Any
) -> nn.Module:
    fields = _override(
        overrides,
        vocab_size=VOCAB, hidden_size=_HIDDEN, intermediate_size=2 * _HIDDEN + 16,
        num_hidden_layers=layers, num_attention_heads=_HEADS, num_key_value_heads=2,
        max_position_embeddings=_MAX_LENGTH, attention_dropout=dropout, use_cache=False,
        pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config = transformers.LlamaConfig(**fields)
    return _huggingface(transformers.LlamaForCausalLM, config, attn_implementation)


@_register("bert", _token_inputs)
def _bert(
    dropout: float, layers: int = 2, attn_implementation: str = "sdpa", **overrides: Any
) -> nn.Module:
    fields = _override(
        overrides,
        vocab_size=VOCAB, hidden_size=_HIDDEN, num_hidden_layers=layers, num_attention_heads=_HEADS,
        intermediate_size=4 * _HIDDEN, max_position_embeddings=_MAX_LENGTH,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, use_cache=False,
    )  # fmt: skip
    config = transformers.BertConfig(**fields)
    return _huggingface(transformers.BertForMaskedLM, config, attn_implementation)


def _image_inputs(batch: int, seq: int, generator: torch.Generator) -> Kwargs:
    pixels = torch.randn((batch, 3, 16, 16), generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 4, (batch,), generator=generator),
    }


@_register("vit", _image_inputs)
def _vit(
    dropout: float, layers: int = 2, attn_implementation: str = "sdpa", **overrides: Any
) -> nn.Module:
    """16 patches and the class token: 17 tokens, which no tensor-parallel size divides."""
    fields = _override(
        overrides,
        hidden_size=_HIDDEN, num_hidden_layers=layers, num_attention_heads=_HEADS,
        intermediate_size=2 * _HIDDEN, image_size=16, patch_size=4, num_labels=4,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    config = transformers.ViTConfig(**fields)
    return _huggingface(transformers.ViTForImageClassification, config, attn_implementation)


def _t5_inputs(batch: int, seq: int, generator: torch.Generator) -> Kwargs:
    """Encoder and decoder of different lengths."""
    return {
        "input_ids": _ids(batch, seq + 3, generator),
        "labels": _labels(batch, seq, generator),
    }


@_register("t5", _t5_inputs)
def _t5(
    dropout: float, layers: int = 3, attn_implementation: str = "sdpa", **overrides: Any
) -> nn.Module:
    """Three layers a stack: the first differs (it computes the position bias), two are alike."""
    fields = _override(
        overrides,
        vocab_size=VOCAB, d_model=_HIDDEN, d_kv=_HIDDEN // _HEADS, d_ff=2 * _HIDDEN,
        num_layers=layers, num_decoder_layers=layers, num_heads=_HEADS, dropout_rate=dropout,
        relative_attention_num_buckets=8, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    config = transformers.T5Config(**fields)
    return _huggingface(transformers.T5ForConditionalGeneration, config, attn_implementation)


@_register("plain", _token_inputs)
@_register("plain_unfused", _token_inputs, fused_qkv=False, tied_head=False)
@_register("plain_logits", _ids_only)
def _plain(dropout: float, layers: int = 2, **overrides: Any) -> nn.Module:
    """The paper's GPT, hand-written with an explicit attention core."""
    fields = _override(
        overrides,
        vocab_size=VOCAB, num_positions=_MAX_LENGTH, hidden_size=_HIDDEN, num_layers=layers,
        num_heads=_HEADS, dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    return plain_gpt(**fields)


def plain_gpt(**fields: Any) -> nn.Module:
    """The paper's GPT of these sizes."""
    return PlainGPT(GPTConfig(**fields))


class TorchEncoder(nn.Module):
    """Embedding, ``nn.TransformerEncoder``, head and loss."""

    def __init__(
        self, dropout: float, layers: int, norm_first: bool, batch_first: bool, causal: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, _HIDDEN)
        layer = nn.TransformerEncoderLayer(
            _HIDDEN, _HEADS, 2 * _HIDDEN, dropout, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(_HIDDEN, VOCAB)
        self.batch_first = batch_first
        self.causal = causal

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids if self.batch_first else input_ids.t())
        mask = None
        if self.causal:
            size = input_ids.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(size, dtype=x.dtype)
        x = self.encoder(x, mask=mask)
        logits = self.head(x if self.batch_first else x.transpose(0, 1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@_register("encoder", _token_inputs)
@_register("encoder_prenorm", _token_inputs, norm_first=True)
@_register("encoder_causal", _token_inputs, norm_first=True, causal=True)
@_register("encoder_seqfirst", _token_inputs, batch_first=False)
def _torch_encoder(
    dropout: float,
    layers: int = 2,
    norm_first: bool = False,
    batch_first: bool = True,
    causal: bool = False,
) -> nn.Module:
    return TorchEncoder(dropout, layers, norm_first, batch_first, causal)


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained low-rank correction of it."""

    def __init__(self, in_features: int, out_features: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))


class LoraBlock(nn.Module):
    """Pre-norm attention and MLP; only the low-rank corrections are trained."""

    def __init__(self, rank: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_HIDDEN).requires_grad_(False)
        self.query = LoraLinear(_HIDDEN, _HIDDEN, rank, dropout)
        self.key = nn.Linear(_HIDDEN, _HIDDEN).requires_grad_(False)
        self.value = LoraLinear(_HIDDEN, _HIDDEN, rank, dropout)
        self.out = nn.Linear(_HIDDEN, _HIDDEN).requires_grad_(False)
        self.mlp_norm = nn.LayerNorm(_HIDDEN).requires_grad_(False)
        self.fc = LoraLinear(_HIDDEN, 2 * _HIDDEN, rank, dropout)
        self.proj = LoraLinear(2 * _HIDDEN, _HIDDEN, rank, dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(core.transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.mlp_norm(x))))


class LoraModel(nn.Module):
    """A language model with frozen weights and trained adapters."""

    def __init__(self, layers: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, _HIDDEN).requires_grad_(False)
        self.blocks = nn.ModuleList(LoraBlock(rank, dropout) for _ in range(layers))
        self.head = nn.Linear(_HIDDEN, VOCAB, bias=False).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@_register("lora", _token_inputs)
def _lora(dropout: float, layers: int = 2, rank: int = 4) -> nn.Module:
    return LoraModel(layers, rank, dropout)


def _peft(model: nn.Module, targets: list[str], dropout: float, conv1d: bool) -> nn.Module:
    import peft  # a heavy import that only these two models need

    config = peft.LoraConfig(
        r=4, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=conv1d,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with warnings.catch_warnings():
        # peft reads an attribute that transformers deprecates.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return peft.get_peft_model(model, config)


@_register("peft_gpt2", _token_inputs)
def _peft_gpt2(dropout: float, **overrides: Any) -> nn.Module:
    return _peft(_gpt2(dropout, **overrides), ["c_attn"], dropout, conv1d=True)


@_register("peft_llama", _token_inputs)
def _peft_llama(dropout: float, **overrides: Any) -> nn.Module:
    return _peft(_llama(dropout, **overrides), ["q_proj", "v_proj"], dropout, conv1d=False)
