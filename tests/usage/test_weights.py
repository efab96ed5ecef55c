"""Weights come and go: state dicts, checkpoints, models on the meta device."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from tests.helpers.tiny_llama import write_config
from tests.helpers.users import assert_same_gradients, batch, compiled, net, prepared
from tests.models import zoo


def _on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name, dtype=torch.float32)


def _compiled_on_meta(name: str) -> Any:
    """Compiled for its inputs, without data."""
    return sp_compiler.compile(_on_meta(name), tp=1, example_inputs=((), zoo.inputs(name)))


def test_state_goes_through_a_file_and_into_the_original_model(tmp_path: Path) -> None:
    module = prepared()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(batch())["loss"].backward()
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c")
    model = net()
    model.load_state_dict(saved["model"])
    other = prepared()
    other.load_state_dict(saved["model"])
    resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
    resumed.load_state_dict(saved["optimizer"])
    for one, its in ((module, optimizer), (other, resumed)):
        its.zero_grad()
        one(batch())["loss"].backward()
        its.step()
    torch.testing.assert_close(dict(other.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    model.zero_grad()
    model(batch())["loss"].backward()
    assert_same_gradients(module, model)


def test_names_are_the_models_own_and_ties_are_kept() -> None:
    model = zoo.build("gpt2", layers=1)
    names = list(model.state_dict())
    module: Any = sp_compiler.compile(model, tp=1)
    assert list(module.state_dict()) == names
    assert module.lm_head.weight is module.transformer.wte.weight
    values = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    assert not module.load_state_dict(values, assign=True).missing_keys
    assert module.lm_head.weight is module.transformer.wte.weight
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**values, "transformer.ln_f.weight": torch.zeros(3)})


def test_a_model_on_the_meta_device_stays_there_until_it_is_loaded(tmp_path: Path) -> None:
    module, model = _compiled_on_meta("gpt2"), zoo.build("gpt2", dtype=torch.float32)
    inputs = zoo.inputs("gpt2")
    with pytest.raises(ArgumentError, match=r"no data.*load_pretrained"):
        module(**inputs)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert module.load_pretrained(tmp_path) == []
    assert module.lm_head.weight is module.transformer.wte.weight
    module(**inputs).loss.backward()
    model(**inputs).loss.backward()
    assert_same_gradients(module, model, 1e-5)
    before = module.transformer.wte.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, module.transformer.wte.weight)


def test_tables_that_no_checkpoint_holds_are_computed(tmp_path: Path) -> None:
    """Rotary frequencies are buffers that are not saved; the files are several, with an index."""
    module, model = _compiled_on_meta("llama"), zoo.build("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    assert (tmp_path / "model.safetensors.index.json").is_file()
    module.load_pretrained(tmp_path)
    inputs = zoo.inputs("llama")
    torch.testing.assert_close(module(**inputs).loss, model(**inputs).loss)


def test_a_checkpoint_into_a_module_that_has_data(tmp_path: Path) -> None:
    module, model = prepared(), net()
    with torch.no_grad():
        model.head.weight.mul_(2)
    state = {**model.state_dict(), "extra": torch.zeros(1)}
    save_file(state, tmp_path / "some.safetensors")
    assert module.load_pretrained(tmp_path / "some.safetensors") == ["extra"]
    torch.testing.assert_close(module(batch()), model(batch()), rtol=1e-12, atol=0)


def test_checkpoints_of_the_model_without_its_head(tmp_path: Path) -> None:
    """Their names lack the prefix of the inner model."""
    model = zoo.build("gpt2", dtype=torch.float32)
    inner = dict(model.transformer.state_dict())
    save_file(inner, tmp_path / "model.safetensors")
    module = _compiled_on_meta("gpt2")
    assert module.load_pretrained(tmp_path) == []
    inputs = zoo.inputs("gpt2")
    torch.testing.assert_close(module(**inputs).loss, model(**inputs).loss)


def test_a_state_dict_without_assign(tmp_path: Path) -> None:
    """torch does nothing then, with a warning per parameter."""
    module, model = _compiled_on_meta("llama"), zoo.build("llama", dtype=torch.float32)
    with pytest.raises(ArgumentError, match=r"on the meta device.*assign=True"):
        module.load_state_dict(model.state_dict())
    module.load_state_dict(model.state_dict(), assign=True)  # computes rotary tables as well
    inputs = zoo.inputs("llama")
    torch.testing.assert_close(module(**inputs).loss, model(**inputs).loss)


class _Classifier(nn.Module):
    """An encoder with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        encoder: Any = zoo.build("bert", dtype=torch.float32).bert
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_ids).last_hidden_state[:, 0]).square().mean()


def test_a_part_of_the_model_from_a_checkpoint(tmp_path: Path) -> None:
    pretrained, model = zoo.build("bert", dtype=torch.float32), _Classifier()
    zoo.randomise(pretrained, 3)
    ids = zoo.inputs("bert")["input_ids"]
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=1, example_inputs=((ids,), {}))
    # Of the encoder alone, and of a model that has it under its base_model_prefix.
    for number, source in enumerate((pretrained.bert, pretrained)):
        folder = tmp_path / str(number)
        source.save_pretrained(folder)  # type: ignore[operator]
        unused = module.load_pretrained(folder, prefix="encoder")
        assert all(name.startswith("cls.") for name in unused)
        model.encoder.load_state_dict(pretrained.bert.state_dict())
        torch.testing.assert_close(module(ids), model(ids))
        module.load_state_dict(_Classifier().state_dict())
        module.head.load_state_dict(model.head.state_dict())
    layers = "encoder.encoder.layer.0, encoder.encoder.layer.1"
    for prefix, said in (
        ("encode", "did you mean 'encoder'? the modules of the model are encoder, head"),
        ("transformer_blocks", "of the model are encoder, head"),
        ("head.bert", "of 'head' are (none)"),
        ("encoder.encoder.layer.7.x", f"of 'encoder.encoder.layer' are {layers}"),
    ):
        with pytest.raises(ArgumentError, match=f"prefix='{prefix}'.*{re.escape(said)}"):
            module.load_pretrained(tmp_path / "0", prefix=prefix)
    with pytest.raises(ArgumentError, match=r"encoder\.embeddings.*prefix="):
        module.load_pretrained(tmp_path / "0")


@pytest.mark.slow
def test_an_encoder_on_meta_inside_of_a_wrapper_with_weights_of_its_own(tmp_path: Path) -> None:
    pretrained, model = zoo.build("bert", dtype=torch.float32), _Classifier()
    zoo.randomise(pretrained, 3)
    pretrained.save_pretrained(tmp_path)  # type: ignore[operator]
    half = copy.deepcopy(model)
    half.encoder.to("meta")
    ids = zoo.inputs("bert")["input_ids"]
    module: Any = sp_compiler.compile(half, tp=1, example_inputs=((ids,), {}))
    with pytest.raises(ArgumentError, match=r"have no data \(encoder\."):
        module(ids)
    module.load_pretrained(tmp_path, prefix="encoder")
    model.encoder.load_state_dict(pretrained.bert.state_dict())
    for each in (module, model):
        each(ids).backward()
    torch.testing.assert_close(module(ids), model(ids))
    assert_same_gradients(module, model)


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    module = compiled()
    with pytest.raises(ArgumentError, match=r"model\.safetensors"):
        module.load_pretrained(tmp_path)
    state = dict(net().state_dict())
    save_file({**state, "head.bias": torch.zeros(7)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ArgumentError, match=r"'head\.bias' has shape \(7,\).*\(3,\).*configuration"
    ):
        module.load_pretrained(tmp_path)
    del state["blocks.0.up.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"1 parameters.*blocks\.0\.up\.weight"):
        module.load_pretrained(tmp_path)


def test_embeddings_are_resized_before_the_compilation(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(
        write_config(tmp_path, model_type="llama", use_cache=False).parent
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.resize_token_embeddings(80)
    module: Any = sp_compiler.compile(model, tp=1)
    with pytest.raises(UnsupportedError, match=r"resize before sp_compiler\.compile"):
        module.resize_token_embeddings(96)
    ids = torch.arange(72, 80)[None]
    assert module(input_ids=ids, labels=ids).loss.isfinite()
