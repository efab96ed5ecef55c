"""Capture of models of which only a part, such as a pretrained encoder, is on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Context in which all parameters and buffers of ``model`` are on meta if a parameter is.

    An operator takes no operands of two devices. A capture reads shapes alone, and the parameters
    keep their numbers: they are exchanged for others without, and put back in the end.
    """
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) < 2:
        yield
        return
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    twins: dict[int, Tensor] = {}  # by identity, so that tied parameters stay tied
    try:
        for table in tables:
            for name, value in table.items():
                if value is not None and not value.is_meta:
                    table[name] = twins.setdefault(id(value), _on_meta(value))
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)


def _on_meta(value: Tensor) -> Tensor:
    twin = value.detach().to("meta")
    return nn.Parameter(twin, value.requires_grad) if isinstance(value, nn.Parameter) else twin
