"""Two tiny configurations of every architecture that people train, as a table.

``dividing``: 8 heads, 4 or 8 kv heads, vocabulary 128, widths that 8 divides. ``awkward``: 4 heads,
2 kv heads, vocabulary 131, widths and lengths that 8 does not divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import parity
from tests.models import zoo

LAYERS = 2
Kwargs = dict[str, Any]
OMIT = object()
"""As a field of a configuration: one of the common fields that it must not be given."""


@dataclass(frozen=True)
class Size:
    """Widths of a configuration; ``head`` is the width of one head."""

    heads: int
    kv: int
    hidden: int
    ffn: int
    vocab: int
    batch: int
    seq: int
    experts: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


DIVIDING = Size(heads=8, kv=8, hidden=64, ffn=128, vocab=128, batch=2, seq=12, experts=8)
GROUPED = Size(heads=8, kv=4, hidden=64, ffn=128, vocab=128, batch=2, seq=12, experts=8)
AWKWARD = Size(heads=4, kv=2, hidden=48, ffn=100, vocab=131, batch=3, seq=11, experts=6)
CONFIGURATIONS = ("dividing", "awkward")
RANKS = (2, 4, 8)


def size(configuration: str, ranks: int) -> Size:
    """Sizes for a number of ranks: what divides must divide by it."""
    if configuration == "awkward":
        return AWKWARD
    return DIVIDING if ranks == 8 else GROUPED


def turn(name: str, configuration: str) -> int:
    """The number of ranks that the tests run: 2, 4 and 8 take turns over the architectures."""
    first = 1 if configuration == "awkward" else 0
    return RANKS[(names().index(name) + first) % len(RANKS)]


@dataclass(frozen=True)
class Architecture:
    """How to build and call one model.

    Attributes:
        make: from a size to the model, not yet randomised.
        inputs: from a size and a generator to the keyword arguments of a call.
        decoder_only: a language model of one causal stack.
    """

    make: Callable[[Size], nn.Module]
    inputs: Callable[[Size, torch.Generator], Kwargs]
    decoder_only: bool = False


_TABLE: dict[str, Architecture] = {}


def names(*, decoder_only: bool = False) -> list[str]:
    """Every architecture, in a fixed order."""
    return [name for name, item in _TABLE.items() if item.decoder_only or not decoder_only]


def build(name: str, size: Size) -> nn.Module:
    """``name`` in float64 and train mode, without dropout, with parameters of order one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _TABLE[name].make(size)
    zoo.randomise(model, 0)
    return model.double().train()


def inputs(name: str, size: Size) -> Kwargs:
    """Keyword arguments of a call."""
    return _TABLE[name].inputs(size, torch.Generator().manual_seed(0))


def case(name: str, size: Size) -> parity.Case:
    """``name`` captured in float64, and its true result.

    New tensors are float64 too, as what a model compares them with: the smallest number of that
    type, say, which float32 does not have.
    """
    with float64():
        return parity.make_case(build(name, size), inputs(name, size))


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def hf_config(config_class: str, **fields: Any) -> Any:
    """A configuration without dropout of any kind."""
    config = getattr(transformers, config_class)(**fields)
    nested = [
        value for value in vars(config).values() if isinstance(value, type(config).__mro__[1])
    ]
    for item in (config, *nested):
        for field, value in vars(item).items():
            if "drop" in field and isinstance(value, float):
                setattr(item, field, 0.0)
    return config


def _common(size: Size) -> Kwargs:
    """What most configurations call their sizes; the others ignore it."""
    return {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.ffn,
        "num_hidden_layers": LAYERS, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv, "max_position_embeddings": 64, "use_cache": False,
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def _ids(size: Size, generator: torch.Generator, seq: int | None = None) -> Tensor:
    return torch.randint(2, size.vocab, (size.batch, seq or size.seq), generator=generator)


def _labels(size: Size, generator: torch.Generator) -> Tensor:
    labels = _ids(size, generator)
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.2, -100)


def _tokens(size: Size, generator: torch.Generator) -> Kwargs:
    return {"input_ids": _ids(size, generator), "labels": _labels(size, generator)}


def _add(
    name: str,
    family: str,
    extra: Callable[[Size], Kwargs] = lambda size: {},
    *,
    model: str = "ForCausalLM",
    config: str | None = None,
    attention: str = "sdpa",
    experts: str | None = None,
    inputs: Callable[[Size, torch.Generator], Kwargs] = _tokens,
) -> None:
    """One HuggingFace model: class names from ``family``, sizes from the common table and extra."""

    def make(size: Size) -> nn.Module:
        fields = {**_common(size), **extra(size)}
        fields = {key: value for key, value in fields.items() if value is not OMIT}
        made = hf_config(config or f"{family}Config", **fields)
        made._attn_implementation = attention
        if experts is not None:
            made._experts_implementation = experts
        return getattr(transformers, f"{family}{model}")(made)

    decoder_only = model in ("ForCausalLM", "LMHeadModel")
    _TABLE[name] = Architecture(make, inputs, decoder_only)


# Decoder-only language models.

_add("gpt2", "GPT2", lambda s: {"loss_type": "ForCausalLM"}, model="LMHeadModel")
_add("llama", "Llama")
_add("mistral", "Mistral", lambda s: {"sliding_window": 5})
_add("qwen2", "Qwen2")
_add("qwen3", "Qwen3", lambda s: {"head_dim": s.head})
_add("gemma", "Gemma", lambda s: {"head_dim": s.head})
_add(
    "gemma2",
    "Gemma2",
    lambda s: {"head_dim": s.head, "sliding_window": 5, "query_pre_attn_scalar": s.head},
    attention="eager",
)
_add(
    "gemma3_text",
    "Gemma3",
    lambda s: {
        "head_dim": s.head, "sliding_window": 5, "query_pre_attn_scalar": s.head,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    config="Gemma3TextConfig",
)  # fmt: skip
_add("phi", "Phi", lambda s: {"partial_rotary_factor": 0.5})
_add("phi3", "Phi3", lambda s: {"pad_token_id": 0})
_add("opt", "OPT", lambda s: {"ffn_dim": s.ffn, "word_embed_proj_dim": s.hidden, "pad_token_id": 1})
_add("bloom", "Bloom", lambda s: {"n_layer": LAYERS, "n_head": s.heads}, attention="eager")
_add("falcon", "Falcon", lambda s: {"num_kv_heads": s.kv, "new_decoder_architecture": True})
_add("gpt_neox", "GPTNeoX", lambda s: {"rotary_pct": 0.5})
_add("gptj", "GPTJ", lambda s: {"rotary_dim": 4, "n_inner": s.ffn}, attention="eager")
_add(
    "gpt_neo",
    "GPTNeo",
    lambda s: {
        "num_layers": LAYERS, "num_heads": s.heads, "window_size": 5,
        "attention_types": [[["global", "local"], 1]],
    },
    attention="eager",
)  # fmt: skip
_add("codegen", "CodeGen", lambda s: {"rotary_dim": 4, "n_inner": s.ffn}, attention="eager")
_add("mpt", "Mpt", lambda s: {"expansion_ratio": 2, "max_seq_len": 64}, attention="eager")
_add("stablelm", "StableLm", lambda s: {"partial_rotary_factor": 0.5})
_add("starcoder2", "Starcoder2")
_add("olmo", "Olmo")
_add("olmo2", "Olmo2")
_add("cohere", "Cohere")
_add("granite", "Granite")
_add(
    "mixtral",
    "Mixtral",
    lambda s: {"num_local_experts": s.experts, "output_router_logits": True},
)
_add(
    "qwen2_moe",
    "Qwen2Moe",
    lambda s: {
        "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.ffn,
        "shared_expert_intermediate_size": s.ffn, "output_router_logits": True,
    },
    experts="batched_mm",
)  # fmt: skip
_add(
    "qwen3_moe",
    "Qwen3Moe",
    lambda s: {
        "num_experts": s.experts, "num_experts_per_tok": 2, "moe_intermediate_size": s.ffn,
        "head_dim": s.head,
    },
)  # fmt: skip
_add(
    "deepseek_v3",
    "DeepseekV3",
    lambda s: {
        "num_key_value_heads": s.heads, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
        "topk_group": 1, "n_routed_experts": s.experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ffn, "first_k_dense_replace": 1,
    },
)  # fmt: skip
_add(
    "gpt_oss",
    "GptOss",
    lambda s: {
        "head_dim": s.head, "num_local_experts": s.experts, "num_experts_per_tok": 2,
        "sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    attention="eager",
)  # fmt: skip
_add("mamba", "Mamba", lambda s: {"state_size": 4, "expand": 2}, attention="eager")
_add(
    "xglm",
    "XGLM",
    lambda s: {
        "d_model": s.hidden, "ffn_dim": s.ffn, "num_layers": LAYERS, "attention_heads": s.heads,
        "pad_token_id": 1,
    },
    attention="eager",
)  # fmt: skip
_add("biogpt", "BioGpt", lambda s: {"pad_token_id": 1})
_add(
    "llama4_text",
    "Llama4",
    lambda s: {
        "head_dim": s.head, "num_local_experts": s.experts, "intermediate_size_mlp": s.ffn,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
    },
    config="Llama4TextConfig",
)  # fmt: skip
_add("gpt_bigcode", "GPTBigCode")
_add(
    "qwen3_next",
    "Qwen3Next",
    lambda s: {
        "head_dim": s.head, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": s.heads, "linear_num_key_heads": s.kv, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": s.experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ffn, "shared_expert_intermediate_size": s.ffn,
        "partial_rotary_factor": 0.5,
    },
)  # fmt: skip

# Encoders.

_MASKED: Kwargs = {"model": "ForMaskedLM"}
_add("bert", "Bert", lambda s: {"pad_token_id": 0}, **_MASKED)
_add("roberta", "Roberta", lambda s: {"pad_token_id": 1, "max_position_embeddings": 66}, **_MASKED)
_add(
    "deberta_v2",
    "DebertaV2",
    lambda s: {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"],
        "pad_token_id": 0, "position_biased_input": False,
    },
    attention="eager",
    **_MASKED,
)  # fmt: skip
_add("albert", "Albert", lambda s: {"embedding_size": 32, "pad_token_id": 0}, **_MASKED)
_add("electra", "Electra", lambda s: {"embedding_size": 32, "pad_token_id": 0}, **_MASKED)
_add(
    "distilbert",
    "DistilBert",
    lambda s: {
        "dim": s.hidden, "hidden_dim": s.ffn, "n_layers": LAYERS, "n_heads": s.heads,
        "pad_token_id": 0,
    },
    **_MASKED,
)  # fmt: skip
_add(
    "modernbert",
    "ModernBert",
    lambda s: {"num_hidden_layers": 3, "local_attention": 6, "pad_token_id": 0},
    **_MASKED,
)
_add(
    "xlm_roberta",
    "XLMRoberta",
    lambda s: {"pad_token_id": 1, "max_position_embeddings": 66},
    **_MASKED,
)

# Encoder-decoders.


def _two_lengths(size: Size, generator: torch.Generator) -> Kwargs:
    return {
        "input_ids": _ids(size, generator, size.seq + 3),
        "labels": _labels(size, generator),
    }


def _t5(size: Size) -> Kwargs:
    return {
        "d_model": size.hidden, "d_kv": size.head, "d_ff": size.ffn, "num_layers": LAYERS,
        "num_decoder_layers": LAYERS, "num_heads": size.heads, "pad_token_id": 0,
        "relative_attention_num_buckets": 8, "decoder_start_token_id": 0,
    }  # fmt: skip


def _bart(size: Size) -> Kwargs:
    sides = {
        f"{side}_{field}": value
        for side in ("encoder", "decoder")
        for field, value in (
            ("layers", LAYERS),
            ("attention_heads", size.heads),
            ("ffn_dim", size.ffn),
        )
    }
    return {
        **sides, "d_model": size.hidden, "pad_token_id": 1, "decoder_start_token_id": 0,
        "forced_eos_token_id": 0,
    }  # fmt: skip


_SEQ2SEQ: Kwargs = {"model": "ForConditionalGeneration", "inputs": _two_lengths}
_add("t5", "T5", _t5, **_SEQ2SEQ)
_add("mt5", "MT5", _t5, **_SEQ2SEQ)
_add("bart", "Bart", _bart, **_SEQ2SEQ)
_add("mbart", "MBart", _bart, **_SEQ2SEQ)
_add("pegasus", "Pegasus", _bart, **_SEQ2SEQ)


def _sound(size: Size, generator: torch.Generator) -> Kwargs:
    features = torch.randn((size.batch, 8, 20), generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": _labels(size, generator)}


_add(
    "whisper",
    "Whisper",
    lambda s: {
        **_bart(s), "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64,
        "begin_suppress_tokens": None, "suppress_tokens": None,
    },
    model="ForConditionalGeneration",
    inputs=_sound,
)  # fmt: skip

# Vision.


def _image(size: Size, generator: torch.Generator) -> Kwargs:
    pixels = torch.randn((size.batch, 3, 16, 16), generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 4, (size.batch,), generator=generator),
    }


_PATCHES: Kwargs = {"image_size": 16, "patch_size": 4, "num_labels": 4}
_IMAGES: Kwargs = {"model": "ForImageClassification", "inputs": _image}
_add("vit", "ViT", lambda s: _PATCHES, **_IMAGES)
_add("deit", "DeiT", lambda s: _PATCHES, **_IMAGES)
_add("beit", "Beit", lambda s: {**_PATCHES, "use_relative_position_bias": True}, **_IMAGES)
_add(
    "swin",
    "Swin",
    lambda s: {
        **_PATCHES, "image_size": [16, 16], "patch_size": [2, 2], "window_size": 2,
        "embed_dim": s.hidden, "depths": [2, 2],
        "num_heads": [s.heads, s.heads], "mlp_ratio": 2.0, "num_attention_heads": OMIT,
        "num_hidden_layers": OMIT,
    },
    **_IMAGES,
)  # fmt: skip
_add("dinov2", "Dinov2", lambda s: _PATCHES, **_IMAGES)

# Text and images contrasted.


def _pairs(size: Size, generator: torch.Generator) -> Kwargs:
    pixels = _image(size, generator)["pixel_values"]
    return {"input_ids": _ids(size, generator), "pixel_values": pixels, "return_loss": True}


def _two_towers(size: Size) -> Kwargs:
    text = {
        **_common(size),
        "pad_token_id": 1,
        "projection_dim": 32,
        "projection_size": size.hidden,
    }
    return {
        "text_config": text,
        "vision_config": {**_common(size), **_PATCHES, "projection_dim": 32},
        "projection_dim": 32,
    }


_add("clip", "CLIP", _two_towers, model="Model", inputs=_pairs)
_add("siglip", "Siglip", _two_towers, model="Model", inputs=_pairs)

# What is not from HuggingFace.


def _torch_encoder(size: Size) -> nn.Module:
    return TorchStack(size, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _torch_decoder(size: Size) -> nn.Module:
    return TorchStack(size, nn.TransformerDecoderLayer, nn.TransformerDecoder)


class TorchStack(nn.Module):
    """An embedding, a stack of ``torch.nn`` called with a causal mask, a head and a loss."""

    def __init__(self, size: Size, layer: Any, stack: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.hidden)
        options = {"dropout": 0.0, "batch_first": True}
        self.stack = stack(layer(size.hidden, size.heads, size.ffn, **options), LAYERS)
        self.head = nn.Linear(size.hidden, size.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        hidden = self.stack(x, mask) if memory is None else self.stack(x, memory, tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _with_memory(size: Size, generator: torch.Generator) -> Kwargs:
    shape = (size.batch, size.seq + 3, size.hidden)
    memory = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {**_tokens(size, generator), "memory": memory}


def _nanogpt(size: Size) -> nn.Module:
    return zoo.plain_gpt(
        vocab_size=size.vocab, num_positions=64, hidden_size=size.hidden, num_layers=LAYERS,
        num_heads=size.heads, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


_TABLE["torch_TransformerEncoder"] = Architecture(_torch_encoder, _tokens)
_TABLE["torch_TransformerDecoder"] = Architecture(_torch_decoder, _with_memory)
_TABLE["nanogpt"] = Architecture(_nanogpt, _tokens, decoder_only=True)
