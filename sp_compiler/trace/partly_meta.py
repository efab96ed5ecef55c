"""Capture of models that are on the meta device, or of which a part is, such as an encoder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Context in which all parameters and buffers of ``model`` are on meta if a parameter is.

    An operator takes no operands of two devices. A capture reads shapes alone, and the parameters
    keep their numbers: they are exchanged for others without, and put back in the end. So are those
    on meta: the fake mode of an export keeps weak references to the tensors that it has seen, and
    with those no tensor can be given numbers in place (``torch.utils.swap_tensors``).
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
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
                if value is not None:
                    table[name] = twins.setdefault(id(value), _on_meta(value))
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.update(own)


def _on_meta(value: Tensor) -> Tensor:
    twin = value.detach().to("meta")
    return nn.Parameter(twin, value.requires_grad) if isinstance(value, nn.Parameter) else twin
