"""The model after its compilation: what would be lost, or computed without numbers, raises."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.fake_group import fake_group

_IDS = torch.zeros(1, 4, dtype=torch.long)


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


_USES: dict[str, Callable[[Any], object]] = {
    "call": lambda model: model(_IDS),
    "call of a part": lambda model: model.model.layers[0].mlp(torch.ones(1, 4, 8)),
    "generate": lambda model: model.generate(_IDS, max_new_tokens=2),
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
    "init": lambda model: nn.init.normal_(model.lm_head.weight),
    "write": lambda model: model.lm_head.weight.data.zero_(),
    "freeze": lambda model: model.requires_grad_(False),
    "hook": lambda model: model.register_forward_hook(print),
    "hook of a layer": lambda model: model.model.layers[0].register_forward_pre_hook(print),
    "gradient of a layer": lambda m: m.model.layers[0].mlp.register_full_backward_hook(print),
    "hook of a weight": lambda model: model.lm_head.weight.register_hook(print),
    "number": lambda model: model.lm_head.weight.sum().item(),
    "numpy": lambda model: model.lm_head.weight.detach().numpy(),
    "state_dict": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "pickle": lambda model: torch.save(model, io.BytesIO()),
    "resize": lambda model: model.resize_token_embeddings(40),
    "dtype": lambda model: model.to(torch.float64),
    "device": lambda model: model.cpu(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "plan": lambda model: sp_compiler.plan(model, ((_IDS,), {}), tp=2),
    "diff": lambda model: sp_compiler.diff(model, model, example_inputs=((_IDS,), {})),
}


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    model = _llama()
    model.compiled = [sp_compiler.compile(model, tp=1)]  # lives as long, and is no child
    return model


@pytest.mark.parametrize("use", _USES)
def test_its_use_says_what_to_use_instead(original: LlamaForCausalLM, use: str) -> None:
    with pytest.raises(UnsupportedError, match=r"belong to the module that .* Use that"):
        _USES[use](original)


def test_files_are_neither_written_nor_read(original: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"save its full_state_dict\(\)"):
        original.save_pretrained(tmp_path)
    # torch collects the errors of all parameters, and warns of each.
    with (
        pytest.warns(match="non-meta parameter"),
        pytest.raises(RuntimeError, match=r"load with its load_state_dict\(\)"),
    ):
        original.load_state_dict(_llama().state_dict())


def test_what_is_known_without_numbers_can_be_read(original: LlamaForCausalLM) -> None:
    weight = original.lm_head.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((32, 8), torch.float32, "meta")
    assert weight.requires_grad
    assert weight.grad is None
    assert repr(weight) == "TakenParameter(shape=(32, 8), dtype=torch.float32)"
    assert original.num_parameters() == _llama().num_parameters()
    assert list(dict(original.named_parameters())) == list(dict(_llama().named_parameters()))
    assert "Embedding(32, 8" in repr(original)


def test_a_copy_of_it_is_as_empty(original: LlamaForCausalLM) -> None:
    copied = copy.deepcopy(original)
    assert copied.lm_head.weight is not original.lm_head.weight
    with pytest.raises(UnsupportedError, match="belong to the module that"):
        copied.lm_head.weight.sum()


def test_parameters_listed_before_the_compilation_raise_on_several_ranks() -> None:
    """In groups by name, say: an optimizer of them would train what no forward reads."""
    model = _llama()
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    with fake_group(2):
        module: Any = sp_compiler.compile(model, tp=2)
        with pytest.raises(UnsupportedError, match=r"give its parameters\(\) to the optimizer"):
            torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}])
        with pytest.raises(UnsupportedError, match="this model was compiled"):
            decayed[0].detach()
        assert [p.shape for p in decayed] == [
            p.shape for name, p in module.named_parameters() if "norm" not in name
        ]


def test_parameters_listed_before_the_compilation_are_its_own_on_one_rank() -> None:
    model = _llama()
    listed = list(model.parameters())
    module: Any = sp_compiler.compile(model, tp=1)
    assert [id(p) for p in listed] == [id(p) for p in module.parameters()]
