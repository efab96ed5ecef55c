"""Sizes of a grid by axis, and the links that its axes use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.base.errors import ArgumentError, expected_one_of
from sp_compiler.cost.hardware import Hardware, Link

Mesh = str | Mapping[str, int] | DeviceMesh
"""A grid as a user writes it; see :meth:`GridSizes.of`."""

_NAMED = re.compile(r"\s*(\w+)\s*=\s*(\d+)\s*")
_EXAMPLES = (
    '"8x35x8" (tp x pp x dp_replicate), "tp=8,pp=4,dp_shard=16", a dict of such names and sizes, '
    "or a DeviceMesh"
)


@dataclass(frozen=True)
class GridSizes:
    """Number of ranks on each axis, with the axis names of ``compile`` and ``pipeline``.

    Neighbouring ranks differ on ``tp`` first, then on ``ep``, ``dp_shard``, ``dp_replicate``,
    ``pp``, so that the axes with the most traffic use the fastest links.
    """

    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    ep: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> GridSizes:
        """Read ``mesh``.

        Raises:
            ArgumentError: other axes, or sizes that are not positive integers.
        """
        sizes: Mapping[str, int]
        if isinstance(mesh, DeviceMesh):
            sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
        elif isinstance(mesh, str):
            sizes = _parsed(mesh)
        else:
            sizes = mesh
        known = [field.name for field in fields(cls)]
        if not isinstance(sizes, Mapping) or not sizes:
            raise ArgumentError(f"mesh={mesh!r}: expected {_EXAMPLES}")
        if unknown := [name for name in sizes if name not in known]:
            raise ArgumentError(
                f"mesh={mesh!r}: unknown axis {unknown[0]!r}: {expected_one_of(unknown[0], known)}"
            )
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ArgumentError(f"mesh: {name}={size!r}: expected a positive integer")
        return cls(**sizes)

    @property
    def data(self) -> int:
        """Number of parts of the data: the product of the data axes."""
        return self.dp_shard * self.dp_replicate * self.ep

    def shards(self, *, divided: bool) -> int:
        """Number of ranks that shard a parameter's part; ranks of "ep" have different experts."""
        return self.dp_shard if divided else self.dp_shard * self.ep

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.data

    def spans_nodes(self, axis: str, gpus_per_node: int) -> bool:
        """Return whether neighbours on ``axis`` are on different nodes."""
        order = ("tp", "ep", "dp_shard", "dp_replicate", "pp")
        # The next neighbour on this axis is ``inner`` ranks away.
        inner = math.prod(getattr(self, name) for name in order[: order.index(axis)])
        return inner * int(getattr(self, axis)) > gpus_per_node

    def __str__(self) -> str:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return " x ".join(f"{n} {size}" for n, size in sizes.items() if size > 1) or "one device"


def _parsed(text: str) -> dict[str, int]:
    if "=" not in text:
        names = ("tp", "pp", "dp_replicate")
        numbers = text.lower().split("x")
        if len(numbers) <= len(names) and all(number.strip().isdecimal() for number in numbers):
            return dict(zip(names, map(int, numbers), strict=False))
        return {}
    pairs = [_NAMED.fullmatch(part) for part in text.split(",")]
    if not all(pairs):
        return {}
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair is not None}
    # An axis that is given twice is an error.
    return sizes if len(sizes) == len(pairs) else {}


@dataclass(frozen=True)
class AxisLink(Link):
    """The slowest link between neighbours on an axis: one rank's share, in one direction.

    Attributes:
        name: shown in tables.
    """

    name: str

    def ring_us(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-gather or reduce-scatter of ``num_bytes`` over ``ranks``."""
        if ranks == 1:
            return 0.0
        # A ring: each rank passes on all parts except the one that it keeps.
        return self.transfer_us(num_bytes * (ranks - 1) / ranks)

    def send_us(self, num_bytes: float) -> float:
        """Return the time of one message."""
        # Nothing is sent if a stage ends before a call that reads nothing.
        return self.transfer_us(num_bytes) if num_bytes else 0.0


def link_of(grid: GridSizes, axis: str, gpus_per_node: int, hardware: Hardware) -> AxisLink:
    """Return the slowest link between neighbours on ``axis``."""
    spans_nodes = grid.spans_nodes(axis, gpus_per_node)
    link = hardware.network if spans_nodes else hardware.interconnect["all_gather"]
    return AxisLink(link.latency_us, link.gb_per_s, "network" if spans_nodes else "node")
