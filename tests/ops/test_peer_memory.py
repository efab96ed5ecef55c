"""Ranks that can read each other's memory, and ranks that cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sp_compiler.ops.gpu import peer_memory
from sp_compiler.ops.gpu.peer_memory import Place, ranks_read_each_other


def _machine(monkeypatch: pytest.MonkeyPatch, *links: tuple[int, int]) -> None:
    """Three devices, of which pairs in ``links`` have one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) in links)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}")
    )
    monkeypatch.setattr(peer_memory.socket, "gethostname", lambda: "host")


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (("host", "GPU-1"), True),
        (("host", "GPU-2"), False),  # no link to it
        (("another", "GPU-1"), False),
    ],
)
def test_a_group(second: Any, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is on GPU 0, which reads GPU 1 and not GPU 2, whether a rank of the group has it."""
    _machine(monkeypatch, (0, 1))

    def gather(places: list[Any], own: Place, group: Any) -> None:
        host, device = second
        places[:] = [own, Place(own.host.replace("host", host), device)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    group: Any = SimpleNamespace(size=lambda: 2)
    assert ranks_read_each_other(group, torch.device("cuda", 0)) is found


def test_another_machine_of_the_same_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _machine(monkeypatch)
    hosts = set()
    for boot in ("one", "two"):
        file = tmp_path / boot
        file.write_text(boot)
        monkeypatch.setattr(peer_memory, "_BOOT_ID", file)
        hosts.add(Place.of(torch.device("cuda", 0)).host)
    assert len(hosts) == 2
