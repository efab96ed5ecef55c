"""diffusers, torchaudio, speechbrain: models of latents and of sound."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.third_party.entry import Entry, Inputs, features


def _dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip


def _latents() -> Inputs:
    return (torch.randn(2, 4, 8, 8),), {
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
        "return_dict": False,
    }


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
        pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip


def _latents_and_text() -> Inputs:
    return (torch.randn(2, 4, 8, 8),), {
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([3.0, 7.0]),
        "return_dict": False,
    }


def _pixart() -> Any:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=64, sample_size=8, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip


def _latents_and_caption() -> Inputs:
    return (torch.randn(2, 4, 8, 8),), {
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _packed_latents() -> Inputs:
    return (), {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
        "return_dict": False,
    }


def diffusers_entries() -> list[Entry]:
    """diffusers' transformers."""
    return [
        Entry("diffusers", "DiT", _dit, _latents),
        Entry("diffusers", "SD3", _sd3, _latents_and_text),
        Entry("diffusers", "PixArt", _pixart, _latents_and_caption),
        Entry("diffusers", "Flux", _flux, _packed_latents),
    ]


def _conformer() -> Any:
    from torchaudio.models import Conformer

    return Conformer(
        input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=3
    )


def _frames() -> Inputs:
    return (torch.randn(2, 12, 32), torch.tensor([12, 9])), {}


def _wav2vec2() -> Any:
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model(
        "layer_norm", [(32, 10, 5), (32, 3, 2)], False, 64, 0.0, 16, 4, 2, 4, 0.0, 128, 0.0, 0.0,
        True, 0.0, 16,
    )  # fmt: skip


def _waveform() -> Inputs:
    return (torch.randn(2, 400),), {}


def torchaudio_entries() -> list[Entry]:
    """torchaudio's encoders of speech."""
    return [
        Entry("torchaudio", "Conformer", _conformer, _frames),
        Entry("torchaudio", "wav2vec2", _wav2vec2, _waveform),
    ]


def _speechbrain(kind: str) -> Any:
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

    if kind == "transformer":
        return TransformerEncoder(num_layers=2, nhead=4, d_ffn=128, d_model=64, dropout=0.0)
    from speechbrain.lobes.models.transformer.Branchformer import BranchformerEncoder

    return BranchformerEncoder(
        num_layers=2, d_model=64, nhead=4, kernel_size=3, csgu_linear_units=128, dropout=0.0,
        attention_type="regularMHA",
    )  # fmt: skip


def speechbrain_entries() -> list[Entry]:
    """speechbrain's encoders of speech."""
    return [
        Entry("speechbrain", kind, lambda k=kind: _speechbrain(k), features(12, 64))  # type: ignore[misc]
        for kind in ("transformer", "branchformer")
    ]
