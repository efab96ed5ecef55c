"""Profiles of devices and their links, and times of kernels and collectives on them.

A profile is a file: those in ``cost/profiles`` have names, and :func:`sp_compiler.profile` measures
a machine and writes its profile.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from sp_compiler.base.errors import ArgumentError, expected_one_of
from sp_compiler.base.placement import I, Placement
from sp_compiler.ir.text import dtype_name
from sp_compiler.ops.convert import LINK_CROSSINGS, conversion_between

_PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Link:
    """A path out of a device: one collective over the interconnect, copies to the host, or messages
    between nodes.

    Attributes:
        latency_us: fixed time per transfer.
        gb_per_s: bandwidth, in 1e9 bytes per second. For a collective, it counts the bytes that
            cross each rank's link, as the "bus bandwidth" of NCCL's tests does: B (n - 1) / n bytes
            for n ranks and a global value of B bytes, twice that for an all-reduce.
    """

    latency_us: float
    gb_per_s: float

    def transfer_us(self, wire_bytes: float) -> float:
        """Return the time of one transfer, in microseconds."""
        return self.latency_us + wire_bytes / self.bytes_per_us

    @property
    def bytes_per_us(self) -> float:
        """Bandwidth, in bytes per microsecond."""
        return self.gb_per_s * 1e3


@dataclass(frozen=True)
class Hardware:
    """Rates of one device and of its links; ``hardware=`` takes one.

    Attributes:
        name: shown in tables.
        peak_tflops: the vendor's peak rate of matmuls by dtype, such as "bfloat16", in 1e12
            operations per second; MFU is relative to it.
        achieved_tflops: the rate that matmuls reach, in the same unit, for estimated times.
        memory_gb_per_s: bandwidth of the device's memory, in 1e9 bytes per second.
        interconnect: the links of the collectives "all_gather", "reduce_scatter" and "all_reduce"
            of the tensor-parallel group.
        host: copies to or from the host's memory, in one direction.
        network: this device's share of the network between nodes, in one direction.
        random_g_per_s: rate at which eager code (``backend="eager"``) draws random numbers, in
            1e9 per second; ``None`` if drawing takes no longer than moving them, as in a single
            kernel on a GPU.

    Raises:
        ArgumentError: a rate that is not positive or not finite, or missing dtypes or collectives.
    """

    name: str
    peak_tflops: Mapping[str, float]
    achieved_tflops: Mapping[str, float]
    memory_gb_per_s: float
    interconnect: Mapping[str, Link]
    host: Link
    network: Link
    random_g_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = {
            "memory_gb_per_s": self.memory_gb_per_s,
            "host.gb_per_s": self.host.gb_per_s,
            "network.gb_per_s": self.network.gb_per_s,
            **{f"interconnect.{k}.gb_per_s": v.gb_per_s for k, v in self.interconnect.items()},
        }
        if self.random_g_per_s is not None:
            rates["random_g_per_s"] = self.random_g_per_s
        for name in ("peak_tflops", "achieved_tflops"):
            given = getattr(self, name)
            # Every other dtype can run as float32; a profile without 16 bits is useless here.
            for dtype in ("float32", "bfloat16"):
                if dtype not in given:
                    raise ArgumentError(f"hardware {self.name!r}: {name} has no {dtype}")
            rates |= {f"{name}.{dtype}": rate for dtype, rate in given.items()}
        if set(self.interconnect) != set(LINK_CROSSINGS):
            raise ArgumentError(
                f"hardware {self.name!r}: interconnect has {', '.join(self.interconnect)}; "
                f"expected {', '.join(LINK_CROSSINGS)}"
            )
        for name, rate in rates.items():
            if not (_is_finite(rate) and rate > 0):
                raise ArgumentError(
                    f"hardware {self.name!r}: {name}={rate!r}: expected a positive, finite number"
                )
        links = {**self.interconnect, "host": self.host, "network": self.network}
        for name, link in links.items():
            if not (_is_finite(link.latency_us) and link.latency_us >= 0):
                raise ArgumentError(
                    f"hardware {self.name!r}: {name}.latency_us={link.latency_us!r}: expected a "
                    "finite number that is not negative"
                )

    def flops_per_us(self, dtype: torch.dtype) -> float:
        """Achieved rate of matmuls in ``dtype``, in operations per microsecond."""
        return _rate(self.achieved_tflops, dtype) * 1e6

    def peak_flops_per_us(self, dtype: torch.dtype) -> float:
        """Peak rate of matmuls in ``dtype``, in operations per microsecond."""
        return _rate(self.peak_tflops, dtype) * 1e6

    @property
    def memory_bytes_per_us(self) -> float:
        return self.memory_gb_per_s * 1e3

    def drawn_us(self, count: float) -> float:
        """Return the time in which eager code draws ``count`` random numbers."""
        return 0.0 if self.random_g_per_s is None else count / (self.random_g_per_s * 1e3)

    @property
    def link_bytes_per_us(self) -> float:
        """Bandwidth of an all-gather over the interconnect, in bytes per microsecond."""
        return self.interconnect["all_gather"].bytes_per_us

    def save(self, path: str | Path) -> None:
        """Write a profile file, which ``hardware=path`` reads."""
        Path(path).write_text(_toml(self), encoding="utf-8")


def _is_finite(value: Any) -> bool:
    # With an infinite rate, which takes no time, shares of a step would be NaN.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _rate(rates: Mapping[str, float], dtype: torch.dtype) -> float:
    # A dtype that a profile does not name (complex, integers) runs on the same units as float32.
    return rates.get(dtype_name(dtype), rates["float32"])


def _toml(hardware: Hardware) -> str:
    """A file like those in ``profiles``; JSON's numbers and strings are also valid in TOML."""
    values = asdict(hardware)
    lines = [f"name = {json.dumps(hardware.name)}"]
    for table in ("peak_tflops", "achieved_tflops"):
        lines += ["", f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in values[table].items())]
    lines += ["", "[memory]", f"gb_per_s = {json.dumps(hardware.memory_gb_per_s)}"]
    lines += ["", "[interconnect]"]
    for kind, link in values["interconnect"].items():
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in link.items())
        lines.append(f"{kind} = {{ {pairs} }}")
    for table in ("host", "network"):
        lines += ["", f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in values[table].items())]
    if hardware.random_g_per_s is not None:
        lines += ["", "[random]", f"g_per_s = {json.dumps(hardware.random_g_per_s)}"]
    return "\n".join(lines) + "\n"


def profile_names() -> tuple[str, ...]:
    """Return the names of profiles that ``hardware=`` accepts."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.toml")))


def hardware_of(value: str | Path | Hardware, argument: str = "hardware") -> Hardware:
    """Return the profile for ``hardware=value``: a name, the path of a file, or a profile itself.

    A file is read each time, because it may have been measured or edited again.

    Args:
        value: what the user gave.
        argument: its name in errors.

    Raises:
        ArgumentError: no such name or file, or the file is not a profile.
    """
    if isinstance(value, Hardware):
        return value
    if isinstance(value, str) and value in profile_names():
        return _named(value)
    if not isinstance(value, (str, Path)) or not Path(value).is_file():
        raise ArgumentError(
            f"{argument}={value!r}: {expected_one_of(value, profile_names(), repr)}, the path of a "
            "file that sp_compiler.profile(path) wrote, or an sp_compiler.Hardware"
        )
    return _read(Path(value), argument)


@cache
def _named(name: str) -> Hardware:
    return _read(_PROFILES / f"{name}.toml", "hardware")


def _read(path: Path, argument: str) -> Hardware:
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return Hardware(
            values["name"],
            values["peak_tflops"],
            values["achieved_tflops"],
            values["memory"]["gb_per_s"],
            {kind: Link(**link) for kind, link in values["interconnect"].items()},
            Link(**values["host"]),
            Link(**values["network"]),
            values["random"]["g_per_s"] if "random" in values else None,
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ArgumentError(
            f"{argument}={str(path)!r}: not a profile: {reason}; {_PROFILES / 'h100.toml'} is one"
        ) from error


H100 = hardware_of("h100")


def collective_us(num_bytes: float, kind: str, world_size: int, hardware: Hardware) -> float:
    """Time of one collective over a global value of ``num_bytes``.

    ``kind`` is a key of :data:`~sp_compiler.ops.convert.LINK_CROSSINGS`; other kinds do not
    communicate.
    """
    if kind not in LINK_CROSSINGS or world_size == 1:
        return 0.0
    # A ring: every rank sends and receives all parts but its own; an all-reduce does so twice.
    wire_bytes = num_bytes * LINK_CROSSINGS[kind] * (world_size - 1) / world_size
    return hardware.interconnect[kind].transfer_us(wire_bytes)


def conversion_us(
    num_bytes: float,
    source: Placement,
    target: Placement,
    world_size: int,
    hardware: Hardware,
    *,
    needs_grad: bool,
) -> float | None:
    """Time of a conversion and of its gradient.

    ``None`` for a conversion that does not exist (nothing converts R to I).
    """
    if source.is_sharded and target.is_sharded:
        # Through the full value: gathered and cut, in forward and in backward.
        price = (world_size, hardware)
        gather_us = conversion_us(num_bytes, source, I, *price, needs_grad=needs_grad)
        cut_us = conversion_us(num_bytes, I, target, *price, needs_grad=needs_grad)
        return (gather_us or 0.0) + (cut_us or 0.0)
    forward = conversion_between(source, target)
    if forward is None or not forward.offered:
        return None
    total = collective_us(num_bytes, forward.method, world_size, hardware)
    if needs_grad:
        backward = conversion_between(target.dual, source.dual)
        assert backward is not None  # every conversion that is offered has a gradient
        total += collective_us(num_bytes, backward.method, world_size, hardware)
    # Collectives work on dim 0: parts of an inner dim, or of segments, are copied into place. Read
    # and written, in forward and in backward, makes four times the bytes.
    inner = any(p.kind == "S" and (p.dim or p.segments) for p in (source, target))
    copies = 4.0 if inner else 0.0
    return total + copies * num_bytes / hardware.memory_bytes_per_us


def operator_us(flops: float, num_bytes: float, hardware: Hardware) -> float:
    """Roofline time of forward and backward of one operator on one rank, for placements."""
    # The backward of a matmul is two matmuls of the same size, one per factor. In 16 bits whatever
    # the model's dtype: a float64 copy of a model should be placed as the model is.
    return 3 * kernel_us(flops, num_bytes, torch.bfloat16, hardware)


def kernel_us(flops: float, num_bytes: float, dtype: torch.dtype, hardware: Hardware) -> float:
    """Roofline time of one kernel that does ``flops`` and moves ``num_bytes`` of memory."""
    flops_us = flops / hardware.flops_per_us(dtype) if flops else 0.0
    return max(flops_us, num_bytes / hardware.memory_bytes_per_us)
