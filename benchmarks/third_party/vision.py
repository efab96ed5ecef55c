"""timm, torchvision, vit-pytorch, open_clip: models of images."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.third_party.entry import Entry, Inputs, images

_TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 2}),
    "xcit_nano_12_p16_224": (64, {"img_size": 64, "depth": 2}),
    "swin_tiny_patch4_window7_224": (
        56, {"img_size": 56, "depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)},
    ),
    "swinv2_tiny_window8_256": (
        64, {"img_size": 64, "depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)},
    ),
    "mixer_s16_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "convnext_atto": (64, {"depths": (1, 1, 2, 1)}),
    "poolformer_s12": (64, {}),
    "pvt_v2_b0": (64, {}),
    "twins_svt_small": (64, {"img_size": 64}),
    "crossvit_tiny_240": (240, {}),
    "vit_relpos_small_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "vit_small_patch14_reg4_dinov2": (56, {"img_size": 56, "depth": 2}),
    "vit_so150m2_patch16_reg1_gap_256": (64, {"img_size": 64, "depth": 2}),
    "visformer_tiny": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "hiera_tiny_224": (224, {}),
    "volo_d1_224": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
}  # fmt: skip


def _timm(name: str, options: dict[str, Any]) -> Any:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=16, **options)


def timm_entries() -> list[Entry]:
    """Models of timm by their registered names, with fewer layers."""
    return [
        Entry("timm", name, lambda n=name, o=options: _timm(n, o), images(size))  # type: ignore[misc]
        for name, (size, options) in _TIMM.items()
    ]


def _torchvision(name: str) -> Any:
    from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2
    from torchvision.models.vision_transformer import VisionTransformer

    if name == "vit":
        return VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=16)
    v2 = {"block": SwinTransformerBlockV2} if name == "swin_v2" else {}
    return SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=16, **v2)


def torchvision_entries() -> list[Entry]:
    """torchvision's transformers; stochastic depth draws nothing at its default of 0."""
    return [
        Entry("torchvision", name, lambda n=name: _torchvision(n), images(64))  # type: ignore[misc]
        for name in ("vit", "swin", "swin_v2")
    ]


_COMMON = {"image_size": 64, "num_classes": 16, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
_PATCHED = {**_COMMON, "patch_size": 16}
_VIT_PYTORCH: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("vit", "ViT", _PATCHED),
    "simple_vit": ("simple_vit", "SimpleViT", _PATCHED),
    "simple_vit_with_register_tokens": ("simple_vit_with_register_tokens", "SimpleViT", _PATCHED),
    "simple_vit_with_qk_norm": ("simple_vit_with_qk_norm", "SimpleViT", _PATCHED),
    "deepvit": ("deepvit", "DeepViT", _PATCHED),
    "cait": ("cait", "CaiT", {**_PATCHED, "cls_depth": 1}),
    "parallel_vit": ("parallel_vit", "ViT", _PATCHED),
    "vit_for_small_dataset": ("vit_for_small_dataset", "ViT", _PATCHED),
    "look_vit": ("look_vit", "LookViT", {
        **{key: _PATCHED[key] for key in ("image_size", "num_classes", "dim", "depth", "heads")},
        "patch_size": 16, "mlp_factor": 2, "dim_head": 16, "highres_patch_size": 8,
        "highres_mlp_factor": 2, "cross_attn_heads": 4, "cross_attn_dim_head": 16,
    }),
    "cct": ("cct", "CCT", {
        "img_size": 64, "embedding_dim": 64, "n_conv_layers": 1, "kernel_size": 7, "stride": 4,
        "padding": 3, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 16,
        "positional_embedding": "learnable",
    }),
    "t2t": ("t2t", "T2TViT", {
        "dim": 64, "image_size": 64, "depth": 2, "heads": 4, "mlp_dim": 128, "num_classes": 16,
        "t2t_layers": ((7, 4), (3, 2)),
    }),
    "crossvit": ("cross_vit", "CrossViT", {
        "image_size": 64, "num_classes": 16, "depth": 1, "sm_dim": 32, "sm_enc_heads": 4,
        "sm_enc_mlp_dim": 64, "sm_patch_size": 16, "sm_enc_depth": 1, "lg_dim": 64,
        "lg_enc_heads": 4, "lg_enc_mlp_dim": 128, "lg_patch_size": 32, "lg_enc_depth": 1,
        "cross_attn_heads": 4, "cross_attn_depth": 1,
    }),
    "regionvit": ("regionvit", "RegionViT", {
        "dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 16,
    }),
    "xcit": ("xcit", "XCiT", {**_PATCHED, "cls_depth": 1, "local_patch_kernel_size": 3}),
}  # fmt: skip


def _vit_pytorch(module: str, cls: str, options: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**options)


def vit_pytorch_entries() -> list[Entry]:
    """Models of vit-pytorch: many ways to write attention, mostly by einops."""
    return [
        Entry("vit-pytorch", name, lambda r=row: _vit_pytorch(*r), images(64))  # type: ignore[misc]
        for name, row in _VIT_PYTORCH.items()
    ]


def _clip() -> Any:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=16, image_size=64)
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=64, heads=4, layers=2)
    return CLIP(32, vision, text)


def _image_and_text() -> Inputs:
    return (torch.randn(2, 3, 64, 64), torch.randint(1, 64, (2, 12))), {}


def open_clip_entries() -> list[Entry]:
    """open_clip's two towers with the contrastive scale."""
    return [Entry("open_clip_torch", "CLIP", _clip, _image_and_text)]
