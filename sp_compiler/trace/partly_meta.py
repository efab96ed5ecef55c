"""Capture of models that are on the meta device, entirely or in part (an encoder, for example)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Context in which all parameters and buffers of ``model`` are on meta if any parameter is.

    The operands of an operator must be on one device. A capture reads only shapes, so all tensors
    are replaced by twins on meta and put back afterwards, with their values. Those that are on meta
    already are replaced as well: the fake mode of an export keeps weak references to the tensors
    that it has seen, and a tensor with weak references cannot be materialized in place
    (``torch.utils.swap_tensors``).
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
