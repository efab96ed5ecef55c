"""Attributes that a user sets on a compiled module: those that forward reads count, no others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler.base.log import LOG
from tests.helpers.users import num_compiled


class Scale(nn.Module):
    """A factor that ``read`` finds in some way; 1 where it finds none."""

    default = 1.0

    def __init__(self, read: Callable[[Any], float], **attributes: Any) -> None:
        super().__init__()
        self.linear, self.inner, self.read = nn.Linear(4, 4), nn.Identity(), read
        vars(self).update(attributes)

    @property
    def doubled(self) -> float:
        return 2 * self.part  # type: ignore[no-any-return]

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.part = value / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.read(self)


def _compiled(read: Callable[[Any], float], **attributes: Any) -> Any:
    torch.manual_seed(0)
    return sp_compiler.compile(Scale(read, **attributes), tp=1)


@pytest.mark.parametrize(
    ("read", "attributes", "name", "value"),
    [
        (lambda m: m.factor, {"factor": 1.0}, "factor", 3.0),
        (lambda m: m.default, {}, "default", 3.0),
        (lambda m: getattr(m, "factor", 1.0), {}, "factor", 3.0),
        (lambda m: 3.0 if hasattr(m, "extra") else 1.0, {}, "extra", None),
        (lambda m: vars(m).get("factor", 1.0), {}, "factor", 3.0),
        (lambda m: 3.0 if "extra" in dir(m) else 1.0, {}, "extra", None),
        (lambda m: m.table["x"], {"table": {"x": 1.0}}, "table", {"x": 3.0}),
        (lambda m: m.config.factor, {"config": SimpleNamespace(factor=1.0)}, "config",
         SimpleNamespace(factor=3.0)),
        (lambda m: m.doubled, {"part": 0.5}, "part", 1.5),
        (lambda m: m.doubled, {"part": 0.5}, "doubled", 3.0),
        (lambda m: m.part * 2, {"part": 0.5}, "doubled", 3.0),
    ],
)  # fmt: skip
def test_what_forward_reads_counts_in_whatever_way_it_does(
    read: Callable[[Any], float], attributes: dict[str, Any], name: str, value: Any
) -> None:
    module, x = _compiled(read, **attributes), torch.ones(2, 4)
    before = module(x)
    setattr(module, name, value)
    torch.testing.assert_close(module(x), 3 * before)


def test_of_modules_inside_the_model_too() -> None:
    module, x = _compiled(lambda m: getattr(m.inner, "factor", 1.0)), torch.ones(2, 4)
    before = module(x)
    module.inner.other = 3.0
    module(x)
    assert num_compiled(module) == 1
    module.inner.factor = 3.0
    torch.testing.assert_close(module(x), 3 * before)


def test_what_forward_only_writes_counts() -> None:
    """It is left as forward leaves it, also where the capture found it so already."""

    def mark(module: Any) -> float:
        module.has_run = True
        return 1.0

    module, x = _compiled(mark, has_run=True), torch.ones(2, 4)
    module(x)
    module.has_run = False
    module(x)
    assert module.has_run is True


def test_a_path_that_is_compiled_later_may_read_more() -> None:
    module = _compiled(lambda m: 1.0 if m.training else m.factor, factor=1.0)
    x = torch.ones(2, 4)
    before = module(x)
    module.factor = 3.0
    module(x)
    assert num_compiled(module) == 1
    for factor in (3.0, 5.0):
        module.factor = factor
        torch.testing.assert_close(module.eval()(x), factor * before)
        torch.testing.assert_close(module.train()(x), before)


def test_what_forward_does_not_read_is_no_reason_to_compile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", LOG.name)
    module, x = _compiled(lambda m: m.factor, factor=1.0), torch.ones(2, 4)
    first = module(x)
    for step in range(3):
        module.global_step, module.best, module.history = step, step / 2, [step] * step
        module(x)
    torch.compile(module, backend="eager")(x)
    assert (num_compiled(module), caplog.messages) == (1, [])
    module.factor = 2.0
    module(x)
    module.factor = 1.0  # as at first
    assert torch.equal(module(x), first)
    assert num_compiled(module) == 2
    assert caplog.messages == ["Scale is compiled again for factor = 2.0 (was 1.0)"]


def test_an_attribute_that_calls_change_is_not_what_it_was_at_first() -> None:
    def mark(module: Any) -> float:
        if module.training:
            module.has_run = True
            return 1.0
        return 3.0 if module.has_run else 1.0

    module, x = _compiled(mark, has_run=False), torch.ones(2, 4)
    before = module.eval()(x)
    module.train()(x)
    module.has_run = True
    torch.testing.assert_close(module.eval()(x), 3 * before)


def test_a_deleted_attribute_is_absent() -> None:
    module, x = _compiled(lambda m: getattr(m, "factor", 1.0), other=2.0), torch.randn(2, 4)
    first = module(x)
    module.factor = 3.0
    torch.testing.assert_close(module(x), 3 * first)
    del module.factor
    torch.testing.assert_close(module(x), first)
    del module.other  # which the model's constructor has set, and forward does not read
    assert not hasattr(module, "other")
    torch.testing.assert_close(module(x), first)
    with pytest.raises(AttributeError, match="factor"):
        del module.factor
