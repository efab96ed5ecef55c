"""Encoders, models of two stacks or two towers, sound, images, and what is from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import zoo
from tests.models.architecture import (
    LAYERS,
    OMIT,
    TABLE,
    Architecture,
    Kwargs,
    Size,
    add,
    common_fields,
    random_ids,
    random_labels,
    tokens,
)

# Encoders.

_MASKED: Kwargs = {"model": "ForMaskedLM"}
add("bert", "Bert", lambda s: {"pad_token_id": 0}, **_MASKED)
add("roberta", "Roberta", lambda s: {"pad_token_id": 1, "max_position_embeddings": 66}, **_MASKED)
add(
    "deberta_v2",
    "DebertaV2",
    lambda s: {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"],
        "pad_token_id": 0, "position_biased_input": False,
    },
    attention="eager",
    **_MASKED,
)  # fmt: skip
add("albert", "Albert", lambda s: {"embedding_size": 32, "pad_token_id": 0}, **_MASKED)
add("electra", "Electra", lambda s: {"embedding_size": 32, "pad_token_id": 0}, **_MASKED)
add(
    "distilbert",
    "DistilBert",
    lambda s: {
        "dim": s.hidden, "hidden_dim": s.ffn, "n_layers": LAYERS, "n_heads": s.heads,
        "pad_token_id": 0,
    },
    **_MASKED,
)  # fmt: skip
add(
    "modernbert",
    "ModernBert",
    lambda s: {"num_hidden_layers": 3, "local_attention": 6, "pad_token_id": 0},
    **_MASKED,
)
add(
    "xlm_roberta",
    "XLMRoberta",
    lambda s: {"pad_token_id": 1, "max_position_embeddings": 66},
    **_MASKED,
)

# Encoder-decoders.


def _two_lengths(size: Size, generator: torch.Generator) -> Kwargs:
    return {
        "input_ids": random_ids(size, generator, size.seq + 3),
        "labels": random_labels(size, generator),
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
add("t5", "T5", _t5, **_SEQ2SEQ)
add("mt5", "MT5", _t5, **_SEQ2SEQ)
add("bart", "Bart", _bart, **_SEQ2SEQ)
add("mbart", "MBart", _bart, **_SEQ2SEQ)
add("pegasus", "Pegasus", _bart, **_SEQ2SEQ)


def _sound(size: Size, generator: torch.Generator) -> Kwargs:
    features = torch.randn((size.batch, 8, 20), generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": random_labels(size, generator)}


add(
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
add("vit", "ViT", lambda s: _PATCHES, **_IMAGES)
add("deit", "DeiT", lambda s: _PATCHES, **_IMAGES)
add("beit", "Beit", lambda s: {**_PATCHES, "use_relative_position_bias": True}, **_IMAGES)
add(
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
add("dinov2", "Dinov2", lambda s: _PATCHES, **_IMAGES)

# Text and images contrasted.


def _pairs(size: Size, generator: torch.Generator) -> Kwargs:
    pixels = _image(size, generator)["pixel_values"]
    return {"input_ids": random_ids(size, generator), "pixel_values": pixels, "return_loss": True}


def _two_towers(size: Size) -> Kwargs:
    text = {
        **common_fields(size),
        "pad_token_id": 1,
        "projection_dim": 32,
        "projection_size": size.hidden,
    }
    return {
        "text_config": text,
        "vision_config": {**common_fields(size), **_PATCHES, "projection_dim": 32},
        "projection_dim": 32,
    }


add("clip", "CLIP", _two_towers, model="Model", inputs=_pairs)
add("siglip", "Siglip", _two_towers, model="Model", inputs=_pairs)

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
        options = {"dropout": size.dropout, "batch_first": True}
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
    return {**tokens(size, generator), "memory": memory}


def _nanogpt(size: Size) -> nn.Module:
    return zoo.plain_gpt(
        vocab_size=size.vocab, num_positions=64, hidden_size=size.hidden, num_layers=LAYERS,
        num_heads=size.heads, dropout=size.dropout, attention_dropout=size.dropout,
    )  # fmt: skip


TABLE["torch_TransformerEncoder"] = Architecture(_torch_encoder, tokens)
TABLE["torch_TransformerDecoder"] = Architecture(_torch_decoder, _with_memory)
TABLE["nanogpt"] = Architecture(_nanogpt, tokens, decoder_only=True)
