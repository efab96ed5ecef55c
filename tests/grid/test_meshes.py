"""Meshes: which axes mean what, and what is said about the others. No rank is a process here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.runtime.mesh_axes import DataAxes
from tests.helpers.fake_group import fake_group
from tests.helpers.slow import slow
from tests.helpers.users import batch, net


@pytest.fixture(autouse=True)
def _eight_ranks() -> Iterator[None]:
    with fake_group(8, rank=5):
        yield


def _mesh(**axes: int) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"tp": 8}, (0, 1)),
        ({"dp_shard": 4, "tp": 2}, (2, 4)),
        ({"tp": 2, "dp_shard": 4}, (1, 4)),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, (2, 4)),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, (0, 2)),
        ({"dp_shard": 8, "tp": 1}, (5, 8)),
        ({"dp_shard": 4, "tp": 2, "other": 1}, (2, 4)),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, (2, 4)),
    ],
    ids=str,
)
def test_the_part_of_the_data(axes: dict[str, int], expected: tuple[int, int]) -> None:
    """Rank 5; "dp_replicate" is the outer axis."""
    assert sp_compiler.data_shard(_mesh(**axes)) == expected


def test_the_shards_of_a_parameter() -> None:
    """Those of "ep" have other experts, and the same other parameters."""
    for axes, of_experts, of_others in (
        ({"dp_shard": 2, "ep": 2, "tp": 2}, 2, 4),
        ({"pp": 2, "dp_replicate": 2, "ep": 2}, 1, 2),
        ({"dp_shard": 4, "tp": 2}, 4, 4),
        ({"dp_replicate": 8}, 1, 1),
        ({"tp": 8}, 1, 1),
    ):
        data = DataAxes.of(_mesh(**axes))
        assert (data.num_shards(divided=True), data.num_shards(divided=False)) == (
            of_experts,
            of_others,
        )


@pytest.mark.parametrize(
    ("axes", "error", "advice"),
    [
        ({"dp_shard": 8}, ArgumentError, r"one of them must be named \"tp\".*of size 1"),
        ({"dp_shard": 2, "dp_replicate": 2, "tp": 2}, ArgumentError, "in the order dp_replicate"),
        ({"dp": 4, "tp": 2}, UnsupportedError, r"\"dp\" of 4 ranks.*dp_shard.*fully_shard"),
        (
            {"ep": 4, "dp_shard": 2, "tp": 1},
            ArgumentError,
            "in the order dp_replicate, dp_shard, ep",
        ),
        ({"pp": 4, "tp": 2}, UnsupportedError, r"4 ranks on its axis \"pp\".*mesh\['tp'\]"),
    ],
)
def test_wrong_meshes(axes: dict[str, int], error: type[Exception], advice: str) -> None:
    model = net()
    with pytest.raises(error, match=advice):
        sp_compiler.compile(model, mesh=_mesh(**axes))
    model(batch())  # nothing was taken over


@pytest.mark.parametrize(
    ("axes", "ranks", "mixed"),
    [
        (("dp_shard", "tp"), [[0, 1], [2, 3], [4, 5], [7, 6]], r"\[0, 1\] along tp.*\[7, 6\]"),
        (("tp", "dp_replicate"), [[0, 1, 2, 3], [4, 6, 5, 7]], r"along dp_replicate.*\[4, 6, 5, 7"),
        (("dp_shard", "tp"), [[7, 6, 5, 4], [3, 2, 1, 0]], None),
        (("pp", "tp"), [[4, 0], [5, 1], [6, 2], [7, 3]], None),
        # Of which FSDP2 makes one axis, for what is no expert.
        (
            ("dp_shard", "ep", "tp"),
            [[[0, 4], [2, 5]], [[1, 6], [3, 7]]],
            r"\[0, 2, 1, 3\] along dp_shard x ep.*\[4, 5, 6, 7\]",
        ),
        (("dp_shard", "ep", "tp"), [[[0, 4], [2, 6]], [[1, 5], [3, 7]]], None),
    ],
)
def test_ranks_in_several_orders(axes: tuple[str, ...], ranks: Any, mixed: str | None) -> None:
    """Torch's groups sort them; a mesh may not have one order here and another one there."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=axes)
    if mixed is None:
        _, parts = sp_compiler.data_shard(mesh)
        assert parts == 8 // (mesh.size(axes.index("tp")) * (4 if "pp" in axes else 1))
        return
    with pytest.raises(ArgumentError, match=mixed):
        sp_compiler.data_shard(mesh)
    with pytest.raises(ArgumentError, match=mixed):
        sp_compiler.compile(net(), mesh=mesh)


def test_what_is_no_mesh() -> None:
    with pytest.raises(ArgumentError, match=r"expected a torch.*DeviceMesh"):
        sp_compiler.compile(net(), mesh=(4, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "fsdp", "error", "advice"),
    [
        ({"tp": 8}, {"mp_policy": None}, ArgumentError, "without an axis"),
        ({"dp_shard": 4, "tp": 2}, {"level": 3}, ArgumentError, r"options level.*reshard_after"),
        ({"dp_replicate": 4, "tp": 2}, {"reshard_after_forward": True}, ArgumentError, "it takes"),
        ({"dp_shard": 4, "tp": 2}, {"reshard_after_forward": 2}, UnsupportedError, "True or False"),
        ({"dp_shard": 4, "tp": 2}, {"mp_policy": "bf16"}, ArgumentError, "MixedPrecisionPolicy"),
        ({"dp_shard": 4, "tp": 2}, {"offload_policy": True}, ArgumentError, "CPUOffloadPolicy"),
        ({"dp_shard": 4, "tp": 2}, "yes", ArgumentError, "True, False or a dict"),
    ],
)
def test_wrong_options(
    axes: dict[str, int], fsdp: Any, error: type[Exception], advice: str
) -> None:
    with pytest.raises(error, match=advice):
        sp_compiler.compile(net(), mesh=_mesh(**axes), fsdp=fsdp)


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(output_dtype=torch.float32)])
def test_fsdp_is_applied_to_blocks_and_root_at_the_first_use(
    policy: MixedPrecisionPolicy | None,
) -> None:
    mesh = _mesh(dp_shard=4, tp=2)
    module = sp_compiler.compile(net(), mesh=mesh, fsdp={"mp_policy": policy})
    assert not isinstance(module, FSDPModule)
    module.prepare(batch())
    wrapped = {name for name, one in module.named_modules() if isinstance(one, FSDPModule)}
    assert wrapped == {"", "blocks.0", "blocks.1"}
    assert isinstance(module._get_fsdp_state()._mp_policy, MixedPrecisionPolicy)
    assert all(p.device_mesh.ndim == 2 for p in module.parameters())


def test_parameters_without_dimensions() -> None:
    model = net()
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(UnsupportedError, match=r"'scale'.*one element"):
        sp_compiler.compile(model, mesh=_mesh(dp_shard=4, tp=2))
    model(batch())  # nothing was taken over
    sp_compiler.compile(model, mesh=_mesh(dp_shard=4, tp=2), fsdp=False)


@pytest.mark.parametrize(
    ("name", "where"),
    [("blocks.1", r"block 'blocks\.1'"), slow("", "the model outside of its blocks")],
)
def test_parameters_of_several_dtypes(name: str, where: str) -> None:
    """Which FSDP2 refuses in the first step; those that are frozen may have any."""
    model = net()
    model.get_submodule(name).register_parameter("other", torch.nn.Parameter(torch.ones(2)))
    module = sp_compiler.compile(model, mesh=_mesh(dp_shard=4, tp=2))
    for _ in range(2):  # no call goes on without data parallelism
        with pytest.raises(UnsupportedError, match=rf"{where} trains .*other' is torch.float32"):
            module.prepare(batch())
    module.get_parameter(f"{name}.other" if name else "other").requires_grad_(False)
    module.prepare(batch())
    assert isinstance(module, FSDPModule)


class _Heads(nn.Module):
    """Attention of heads of four numbers, that are multiplied with themselves."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.up, self.down = nn.Linear(8, 4 * num_heads), nn.Linear(4 * num_heads, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
        scores = (heads @ heads.mT).softmax(-1)
        result: Tensor = self.down((scores @ heads).transpose(1, 2).flatten(2))
        return result


def test_a_rank_without_a_part_of_a_parameter() -> None:
    """Five heads on four ranks are 2, 2, 1 and 0: all ranks say so, before FSDP2 fails on the last.

    This one is the second of them. Six are 2, 2, 2 and 0, seven 2, 2, 2 and 1.
    """
    mesh = _mesh(dp_shard=2, tp=4)
    example: Any = ((torch.randn(2, 3, 8),), {})
    for num_heads in (5, 6):
        with pytest.raises(
            UnsupportedError, match=r"'up.weight' of shape .* the last rank gets none"
        ):
            sp_compiler.compile(_Heads(num_heads), mesh=mesh, example_inputs=example)
    assert isinstance(sp_compiler.compile(_Heads(7), mesh=mesh, example_inputs=example), FSDPModule)


def test_an_error_behind_the_placement_is_the_one_raised(monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("of FSDP2")

    monkeypatch.setattr("sp_compiler.module.calls.apply_data_parallelism", fail)
    with pytest.raises(ValueError, match="of FSDP2"):
        sp_compiler.compile(net(), mesh=_mesh(dp_shard=4, tp=2), example_inputs=((batch(),), {}))


def test_an_optimizer_made_too_early() -> None:
    module = sp_compiler.compile(net(), mesh=_mesh(dp_shard=4, tp=2))
    _early = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"SGD.*pass example_inputs"):
        module(batch())


@pytest.mark.parametrize("tp", [slow(1), 2])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_that_fsdp_replaces(tp: int, kind: str) -> None:
    module = sp_compiler.compile(net(), mesh=_mesh(dp_shard=8 // tp, tp=tp))
    handle = getattr(module.get_parameter("blocks.0.up.bias"), kind)(lambda _: None)
    with pytest.raises(ArgumentError, match=r"blocks\.0\.up\.bias has hooks.*pass example_inputs"):
        module.prepare(batch())
    handle.remove()
    module.prepare(batch())
    assert isinstance(module, FSDPModule)


def test_left_to_the_user() -> None:
    module = sp_compiler.compile(
        net(), mesh=_mesh(dp_shard=4, tp=2), example_inputs=((batch(),), {}), fsdp=False
    )
    assert not isinstance(module, FSDPModule)
