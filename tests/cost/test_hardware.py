"""Hardware profiles: names, files, what a measurement writes, and that all decisions read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.errors import ArgumentError
from sp_compiler.cost import measure
from sp_compiler.cost.hardware import (
    H100,
    Hardware,
    Link,
    collective_us,
    hardware_of,
    kernel_us,
    profile_names,
)
from sp_compiler.options import CompileOptions
from sp_compiler.trace.arguments import ExampleInputs


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_survives_its_file(name: str, tmp_path: Path) -> None:
    hardware = hardware_of(name)
    hardware.save(tmp_path / "copy.toml")
    assert hardware_of(tmp_path / "copy.toml") == hardware_of(str(tmp_path / "copy.toml"))
    assert hardware_of(tmp_path / "copy.toml") == hardware
    assert hardware_of(hardware) is hardware
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert hardware.flops_per_us(dtype) <= hardware.peak_flops_per_us(dtype)


def test_times_by_hand() -> None:
    # 80 MB over 8 ranks: 70 MB cross each link, 140 MB in an all-reduce.
    assert collective_us(80e6, "all_gather", 8, H100) == pytest.approx(2 + 70e6 / 450e3)
    assert collective_us(80e6, "all_reduce", 8, H100) == pytest.approx(4 + 140e6 / 450e3)
    assert collective_us(80e6, "all_reduce", 1, H100) == 0
    assert collective_us(80e6, "shard", 8, H100) == 0
    pcie = hardware_of("a100-pcie")
    assert collective_us(80e6, "reduce_scatter", 8, pcie) == pytest.approx(48.3 + 70e6 / 26e3)
    assert kernel_us(1e12, 1.0, torch.bfloat16, H100) == pytest.approx(2000)
    assert kernel_us(1e12, 1.0, torch.float32, H100) == pytest.approx(20_000)
    assert kernel_us(1.0, 3.35e9, torch.bfloat16, H100) == pytest.approx(1000)


def test_what_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"hardware='b1000': .*expected one of .*'h100'"):
        CompileOptions(hardware="b1000")
    with pytest.raises(ArgumentError, match=r"hardware=100"):
        CompileOptions(hardware=100)  # type: ignore[arg-type]
    broken = tmp_path / "broken.toml"
    broken.write_text("name = 'x'\n")
    with pytest.raises(ArgumentError, match=r"'peak_tflops' is missing"):
        hardware_of(broken)
    rates = {"float32": 1.0, "bfloat16": 1.0}
    link = Link(1.0, 1.0)
    links = dict.fromkeys(H100.interconnect, link)
    with pytest.raises(ArgumentError, match=r"memory_gb_per_s=nan: expected a positive"):
        Hardware("x", rates, rates, float("nan"), links, link, link)
    with pytest.raises(ArgumentError, match=r"achieved_tflops has no bfloat16"):
        Hardware("x", rates, {"float32": 1.0}, 1.0, links, link, link)
    with pytest.raises(ArgumentError, match=r"host.latency_us=-1"):
        Hardware("x", rates, rates, 1.0, links, Link(-1, 1.0), link)
    with pytest.raises(ArgumentError, match=r"network.gb_per_s=0"):
        Hardware("x", rates, rates, 1.0, links, link, Link(1.0, 0))
    with pytest.raises(ArgumentError, match=r"random_g_per_s=0"):
        Hardware("x", rates, rates, 1.0, links, link, link, 0)
    with pytest.raises(ArgumentError, match=r"random_g_per_s=True: expected a positive, finite"):
        Hardware("x", rates, rates, 1.0, links, link, link, True)
    for key in ("latency_us", "gb_per_s"):
        H100.save(broken)
        broken.write_text(re.sub(rf"{key} = [\d.]+", f"{key} = inf", broken.read_text()))
        with pytest.raises(ArgumentError, match=rf"'H100 SXM': .*{key}=inf: expected a .*finite"):
            hardware_of(broken)
    with pytest.raises(ArgumentError, match=r"interconnect has all_gather; expected"):
        Hardware("x", rates, rates, 1.0, {"all_gather": link}, link, link)


def test_ranks_with_different_measurements_differ() -> None:
    faster = Hardware(**{**vars(H100), "memory_gb_per_s": 3351.0})
    texts = [CompileOptions(hardware=each).texts()["hardware"] for each in (H100, faster)]
    assert texts[0] != texts[1]


class _TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).square().mean()


def test_a_plan_is_of_the_hardware() -> None:
    inputs: ExampleInputs = ((torch.randn(8, 64, 64),), {})
    plans = {
        name: sp_compiler.plan(_TwoProducts(), inputs, tp=2, hardware=name)
        for name in ("h100", "h200", "a100-pcie")
    }
    h100, h200, pcie = plans.values()
    assert "on H200 SXM" in str(h200)
    assert h200.options["hardware"] == h200.hardware.name == "H200 SXM"
    assert h200.to_dict()["hardware"]["memory_gb_per_s"] == 4800
    assert h200.work.compute_us < h100.work.compute_us
    assert h200.work.communication_us == h100.work.communication_us < pcie.work.communication_us
    # In float32: of the peak without tensor cores.
    assert h100.mfu == pytest.approx(h100.work.model_flops / (h100.step_us * 67e6))


def test_launches_are_no_part_of_the_rate_of_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's host takes as long to launch a kernel as the kernel takes."""
    launch_s, number_s = 50e-6, 1e-11

    def time_s(draw: Callable[[], Tensor], device: torch.device) -> float:
        return float(launch_s + number_s * draw().numel())

    monkeypatch.setattr(measure, "_time_s", time_s)
    assert measure._random(torch.device("cpu")) == pytest.approx(1e-9 / number_s, rel=1e-3)


def test_a_measurement_is_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MATRIX_SIZES", (32, 64))
    monkeypatch.setattr(measure, "_COPY_BYTES", 1 << 20)
    path = tmp_path / "here.toml"
    random_numbers = torch.get_rng_state()
    measured = sp_compiler.profile(path, device="cpu", interconnect="a100")
    # Ranks measure for different times, and initialize the same model after that.
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert hardware_of(path) == measured
    assert measured.random_g_per_s is not None
    assert measured.name.endswith("threads")
    assert measured.interconnect == hardware_of("a100").interconnect
    assert measured.network == hardware_of("a100").network
    with pytest.raises(ArgumentError, match="there is no folder"):
        sp_compiler.profile(tmp_path / "none" / "here.toml")
    # What cannot be measured or written is said before anything is measured.
    with pytest.raises(ArgumentError, match="it is a folder"):
        sp_compiler.profile(tmp_path)
    with pytest.raises(ArgumentError, match=r"device='gpu': .*expected .*'cpu'"):
        sp_compiler.profile(device="gpu")
    with pytest.raises(ArgumentError, match=r"interconnect='h10': did you mean 'h100'"):
        sp_compiler.profile(interconnect="h10")


def test_a_file_that_was_measured_or_edited_anew_is_read_anew(tmp_path: Path) -> None:
    """Plans kept the numbers that the file had when this process read it first."""
    path = tmp_path / "here.toml"
    hardware_of("a100").save(path)
    first = CompileOptions(hardware=path)
    hardware_of("h200").save(path)
    second = CompileOptions(hardware=path)
    # Each compilation has one profile, whatever becomes of the file.
    assert [each.device.name for each in (first, second)] == ["A100 SXM", "H200 SXM"]
