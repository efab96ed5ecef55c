"""The page about other people's models says what was measured, and how they are compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.third_party.__main__ import PAGE, entries, load, page, prepared, run
from benchmarks.third_party.entry import Entry, Projected

_KEPT = load()


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(_KEPT)


def test_none_is_wrong_and_most_are_right() -> None:
    verdicts = [record.verdict for models in _KEPT.values() for record in models.values()]
    assert len(verdicts) >= 60
    assert "WRONG" not in verdicts
    assert verdicts.count("right") >= 0.9 * len(verdicts)


def test_what_was_kept_is_in_the_list() -> None:
    listed = {(entry.package, entry.name) for entry in entries()}
    assert len(listed) == len(entries())
    assert {(package, name) for package, models in _KEPT.items() for name in models} <= listed


class _Noisy(nn.Module):
    """Draws in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y + torch.rand_like(y) if self.training else y, y.softmax(-1)


class _Casts(nn.Module):
    """Multiplies in float32, and makes the last digits of that count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu().float()
        return (hidden @ self.second.weight.float().t() * 1000).double().sin()


def _entry(model: type[nn.Module]) -> Entry:
    return Entry("torch", "model", model, lambda: ((torch.randn(2, 4, 8),), {}))


def test_a_model_that_draws_is_compared_in_evaluation_mode() -> None:
    model, _, mode = prepared(_entry(_Noisy))
    assert not model.training
    assert mode.startswith("in evaluation mode")
    record = run(_entry(_Noisy))
    assert record.verdict == "right"
    assert record.error is not None
    assert record.error < 1e-12


def test_a_model_whose_casts_round_much_is_compared_without_them() -> None:
    record = run(_entry(_Casts))
    assert record.error is not None
    assert record.error > 1e-6
    assert record.verdict == "right"
    assert record.note.endswith("without its casts to float32")


@pytest.mark.parametrize("model", [_Noisy, _Casts])
def test_a_wrong_gradient_is_wrong(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax's gradient is not lost in the loss: one that is dropped shows."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    loss = Projected(plain)((torch.randn(2, 4, 8),), {})
    loss.backward()
    gradient = plain[0].weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-6

    from benchmarks.third_party import __main__ as runner

    simulate = runner.parity.simulate

    def forgetful(*args: object) -> object:
        step = simulate(*args)  # type: ignore[arg-type]
        for grad in step.grads.values():
            if grad is not None:
                grad.mul_(1.001)
        return step

    monkeypatch.setattr(runner.parity, "simulate", forgetful)
    assert run(_entry(model)).verdict == "WRONG"
