"""Time of copies to the host and back, which :mod:`sp_compiler.ops.gpu.host_memory` starts."""

from __future__ import annotations

from sp_compiler.cost.hardware import Hardware
from sp_compiler.cost.node_cost import Span
from sp_compiler.cost.step_walk import Phase
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned


def transfers_us(parts: Partitioned, hardware: Hardware) -> float:
    """Return the link's time for the tensors that one call sends; fetching them takes the same."""
    link = hardware.host
    return sum(link.transfer_us(tensor.num_bytes) for tensor in parts.saved if tensor.on_host)


def beside_us(num_bytes: int, hardware: Hardware) -> float:
    """Return the time by which copies there and back delay concurrent kernels.

    The copies read and write the device's memory, whose bandwidth they share with the kernels. This
    is a price, so that nothing is sent without need; a timeline does not show it.
    """
    return 2 * num_bytes / hardware.memory_bytes_per_us


class HostLink:
    """The link to the host in one step, which copies one tensor after another.

    Attributes:
        transfers: call, phase of its function, time at which the first copy begins, and the copies
            with times relative to that.
    """

    def __init__(self, compiled: CompiledProgram, hardware: Hardware) -> None:
        self.transfers: list[tuple[int, Phase, float, tuple[Span, ...]]] = []
        self._compiled = compiled
        self._link = hardware.host
        self._free_us = 0.0
        self._leaves_us = 0.0
        self._arrives_us: dict[int, float] = {}

    def left_us(self, index: int, now_us: float) -> float:
        """Return when the previous call's copies have left; those of ``index`` begin now."""
        before_us = self._leaves_us
        self._leaves_us = self._carry(index, "forward", now_us)
        return before_us

    def fetched_us(self, index: int, now_us: float) -> float:
        """Return when call ``index`` has its tensors; the previous call's copies also begin now."""
        for call in (index, index - 1):
            if call >= 0 and call not in self._arrives_us:
                self._arrives_us[call] = self._carry(call, "backward", now_us)
        return self._arrives_us[index]

    def _carry(self, index: int, phase: Phase, now_us: float) -> float:
        """Return when the copies of a call end; they begin now at the earliest."""
        region = self._compiled.program.calls[index].region
        sent = [t for t in self._compiled.regions[region.name].partitioned.saved if t.on_host]
        begin_us = max(now_us, self._free_us)
        spans, end_us = [], 0.0
        for tensor in sent:
            way = "to host" if phase == "forward" else "from host"
            took_us = self._link.transfer_us(tensor.num_bytes)
            spans.append(Span(tensor.name, way, "host", end_us, end_us + took_us))
            end_us += took_us
        if not sent:
            return 0.0
        self.transfers.append((index, phase, begin_us, tuple(spans)))
        self._free_us = begin_us + end_us
        return self._free_us
