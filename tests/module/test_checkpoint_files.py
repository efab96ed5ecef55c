"""Files of weights that are damaged, or that would lead out of their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sp_compiler
from sp_compiler import ArgumentError
from tests.helpers.users import compiled, net

_INDEX = "model.safetensors.index.json"


def _write(folder: Path, weight_map: Any = None, file: str = "part.safetensors") -> Path:
    """A checkpoint of :func:`net` with an index, by default a right one."""
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(net().state_dict())
    save_file(state, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(state, file) if weight_map is None else weight_map}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


def _refused(folder: Path, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        compiled().load_pretrained(folder)


def test_an_index_beside_its_files(tmp_path: Path) -> None:
    assert compiled().load_pretrained(_write(tmp_path)) == []


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = _write(tmp_path / "models--a" / "snapshots" / "f00d")
    blobs = tmp_path / "models--a" / "blobs"
    blobs.mkdir()
    (folder / "part.safetensors").rename(blobs / "beef")
    (folder / "part.safetensors").symlink_to("../../blobs/beef")
    assert compiled().load_pretrained(folder) == []


@pytest.mark.parametrize("how", ["parent", "absolute", "through", "link", "folder_link"])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, how: str) -> None:
    outside = _write(tmp_path / "secret")
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "link.safetensors").symlink_to(outside / "part.safetensors")
    (inside / "sub").symlink_to(outside)
    file = {
        "parent": "../secret/part.safetensors",
        "absolute": str(outside / "part.safetensors"),
        "through": "sub/../../secret/part.safetensors",
        "link": "link.safetensors",
        "folder_link": "sub/part.safetensors",
    }[how]
    _refused(_write(inside, file=file), r"index\.json.*'head\.bias'|index\.json.*for 'blocks")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"index\.json: expected an index in JSON"),
        ("[" * 100_000, r"index\.json: expected an index in JSON"),
        ("[]", r'index\.json: expected the key "weight_map".*NoneType'),
        ('{"weight_map": ["a"]}', r'index\.json: expected the key "weight_map".*list'),
        ('{"weight_map": {"head.bias": 3}}', r"gives 3 for 'head\.bias'"),
        ('{"weight_map": {"head.bias": ""}}', r"gives '' for 'head\.bias': no such file"),
        (
            '{"weight_map": {"head.bias": "no"}}',
            r"'no' for 'head\.bias': no such file in .*; copy every",
        ),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / _INDEX).write_text(text)
    _refused(tmp_path, said)


class _Scaled(nn.Module):
    """A buffer that is saved beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale


def test_buffers_on_meta_are_filled_after_the_compilation(tmp_path: Path) -> None:
    full, x = _Scaled(), torch.randn(2, 4)
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = _Scaled()
    module = sp_compiler.compile(empty, tp=1, example_inputs=((x,), {}))
    assert module.load_pretrained(tmp_path) == []
    torch.testing.assert_close(module(x), full(x))


class _WithTable(nn.Module):
    """A part that no file has, and no ``_init_weights`` to make it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def test_a_buffer_that_no_file_has_is_assigned(tmp_path: Path) -> None:
    expected = _WithTable()
    save_file(dict(expected.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = _WithTable()
    x = torch.randn(2, 4)
    module = sp_compiler.compile(empty, tp=1, example_inputs=((x,), {}))
    with pytest.raises(ArgumentError, match=r"parameters or buffers have no data.*load_pretrained"):
        module(x)
    assert module.load_pretrained(tmp_path) == []
    with pytest.raises(ArgumentError, match=r"buffer table has no data.*module\.table = \.\.\.$"):
        module(x)
    module.table = torch.arange(4.0)
    torch.testing.assert_close(module(x), expected(x))


def test_a_buffer_without_data_is_named_where_the_capture_fails(tmp_path: Path) -> None:
    save_file(dict(_WithTable().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = sp_compiler.compile(_WithTable(), tp=1)
    module.load_pretrained(tmp_path)
    # Its product with what the weights make, which have data now, is one of two devices.
    with pytest.raises(ArgumentError, match="buffer table has no data"):
        module(torch.randn(2, 4))


def test_a_file_of_torch_save_goes_another_way(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "net.pt")
    _refused(tmp_path / "net.pt", r"module\.load_state_dict\(torch\.load\(path")


def test_a_damaged_file_is_named_with_the_tensor(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    part = folder / "part.safetensors"
    part.write_bytes(part.read_bytes()[:-8])
    _refused(folder, r"part\.safetensors: cannot read tensor '[a-z0-9.]+'")
    part.write_bytes(b"\xff" * 64)
    _refused(part, r"part\.safetensors: cannot read tensor")


def test_a_tensor_that_is_not_in_the_file_of_the_index(tmp_path: Path) -> None:
    names = {**dict.fromkeys(net().state_dict(), "part.safetensors"), "gone": "part.safetensors"}
    names["blocks.0.norm.weight"] = "other.safetensors"
    save_file({"gone": net().head.bias.detach()}, tmp_path / "other.safetensors")
    _refused(
        _write(tmp_path, names), r"other\.safetensors: cannot read tensor 'blocks\.0\.norm\.weight'"
    )


def test_names_with_something_in_front(tmp_path: Path) -> None:
    """The advice is true, whether the file or the model has more in front."""
    part = net().blocks[0].state_dict()
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file({f"back.bone.{name}": value for name, value in part.items()}, old)
    module: Any = compiled()
    looked_for = (
        r"\(blocks\.0\.norm\.weight, .*\), looked for as norm\.weight, .*; it has back\.bone"
    )
    advice = r".*start with 'back\.bone\.'.*load_file\(path\).*removeprefix\('back\.bone\.'\)"
    with pytest.raises(ArgumentError, match=looked_for + advice):
        module.load_pretrained(old, prefix="blocks.0")
    save_file(
        {name.removeprefix("back.bone."): value for name, value in load_file(old).items()}, new
    )
    assert module.load_pretrained(new, prefix="blocks.0") == []
    with pytest.raises(ArgumentError, match=r"part of the model: pass prefix='blocks\.0'$"):
        module.load_pretrained(new)
    save_file({"a": torch.ones(1)}, new)
    with pytest.raises(ArgumentError, match=r"it has a\.\.\.; rename the tensors, or"):
        module.load_pretrained(new, prefix="blocks.0")
