"""Architectures of transformers beyond those of docs/coverage.md, as many as one rule makes small.

Architectures and sizes are not hand-picked: each comes from the library's own list for its task,
with its own defaults, of which the fields below are replaced if its configuration has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.third_party.entry import Entry, Inputs, NotSmallError, images, tokens
from tests.models import architectures

_CORE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "vocab_size": 64,
    "embedding_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
# Sizes of heads and states, which some configurations derive from the others.
_INNER: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "mamba_n_heads", "index_topk"), 8),
    **dict.fromkeys(("sliding_window", "attention_window"), 8),
    "qk_head_dim": 24,
    "linear_num_value_heads": 4,
    "mamba_n_groups": 1,
}
_DERIVED = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_PARTS = ("text_config", "vision_config")
_MOST_PARAMETERS = 30_000_000


def _speech() -> Inputs:
    return (torch.randn(2, 800),), {}


def _pair() -> Inputs:
    return (), {
        "input_ids": torch.randint(0, 64, (2, 24)),
        "decoder_input_ids": torch.randint(0, 64, (2, 16)),
    }


_TASKS: dict[str, tuple[str, str, Callable[[], Inputs]]] = {
    "causal_lm": ("CAUSAL_LM", "AutoModelForCausalLM", tokens(24)),
    "masked_lm": ("MASKED_LM", "AutoModelForMaskedLM", tokens(24)),
    "seq2seq_lm": ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", _pair),
    "image": ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification", images(32)),
    "audio": ("AUDIO_CLASSIFICATION", "AutoModelForAudioClassification", _speech),
}
"""By task the name of the library's list, its class of models, and the inputs of one call."""


def transformers_entries() -> list[Entry]:
    """Every architecture that the library lists for a task, once."""
    from transformers.models.auto import modeling_auto

    first: dict[str, Entry] = {}
    for task, (list_name, _, inputs) in _TASKS.items():
        for name in getattr(modeling_auto, f"MODEL_FOR_{list_name}_MAPPING_NAMES"):
            entry = Entry("transformers", f"{task}/{name}", partial(_model, task, name), inputs)
            first.setdefault(name.replace("-", "_"), entry)
    covered = architectures.names()
    return [entry for name, entry in first.items() if name not in covered]


def _model(task: str, name: str) -> nn.Module:
    """Return the model with the first choice of small sizes that runs on the inputs of its task.

    Raises:
        NotSmallError: none runs; with the reason of each.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    defaults, reasons = CONFIG_MAPPING[name], []
    try:
        choices = _choices(defaults())
    except StrictDataclassError as error:  # of some the library refuses its own defaults
        raise NotSmallError(str(error)) from error
    for fields in choices:
        try:
            model = _with(defaults(**fields), task)
            args, kwargs = _TASKS[task][2]()
            copy.deepcopy(model)(*args, **kwargs)  # some keep values of a call
        except Exception as error:  # of whatever kind: the library's code, with sizes of ours
            reasons.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return model
    raise NotSmallError("; ".join(reasons))


def _choices(defaults: Any) -> list[dict[str, Any]]:
    """Return fields to replace in a configuration, fewer and fewer; no two choices are equal."""
    parts = {name: getattr(defaults, name, None) for name in _PARTS}
    parts = {name: part for name, part in parts.items() if hasattr(part, "to_dict")}
    without_heads = {key: value for key, value in _CORE.items() if key not in _DERIVED}
    found: list[dict[str, Any]] = []
    for sizes in ({**_CORE, **_INNER}, _CORE, without_heads):
        for every_kind in (True, False):
            own = {name: _fields(part, sizes, every_kind) for name, part in parts.items()}
            choice = {**_fields(defaults, sizes, every_kind), **own}
            # Most configurations have no kinds of layers, and many no sizes of heads.
            if choice not in found:
                found.append(choice)
    return found


def _fields(defaults: Any, sizes: Mapping[str, Any], every_kind: bool) -> dict[str, Any]:
    known = defaults.to_dict()
    # Not a list, which has one number for each stage.
    fields = {
        key: value
        for key, value in sizes.items()
        if key in known and (known[key] is None or type(known[key]) is type(value))
    }
    # A model with dropout has other gradients in every run.
    fields |= {key: 0.0 for key, value in known.items() if "drop" in key and type(value) is float}
    for key in ("layer_types", "mlp_layer_types"):
        if every_kind and isinstance(known.get(key), list):
            # One layer of each kind, and two at least.
            kinds = list(dict.fromkeys(known[key]))
            fields[key] = kinds * (1 if len(kinds) > 1 else 2)
            fields["num_hidden_layers"] = len(fields[key])
    return fields


def _with(config: Any, task: str) -> nn.Module:
    import transformers

    # Grouped matmuls of experts have no kernel for float64.
    config._experts_implementation = "batched_mm"
    make = getattr(transformers, _TASKS[task][1]).from_config
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in make(config).parameters())
    if num_parameters > _MOST_PARAMETERS:
        raise NotSmallError(f"{num_parameters} parameters")
    model: nn.Module = make(config)
    return model
