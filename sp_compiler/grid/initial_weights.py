"""The weights that ranks start with: compared, or taken from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from sp_compiler.runtime.rank_checks import fingerprints


def agree_on_weights(
    tensors: Mapping[str, Tensor],
    require_equal: Callable[[str, Mapping[str, str]], None],
    receive: Callable[[Tensor], object],
    *,
    broadcasts: bool,
) -> None:
    """Compare ``tensors`` over some ranks, or overwrite them with those of the first one.

    Args:
        tensors: on all of these ranks, by name; those on meta have no values.
        require_equal: raises an error unless facts are equal on these ranks.
        receive: overwrites a tensor with the first rank's.
        broadcasts: whether to overwrite them.
    """
    if not broadcasts:
        require_equal("compares its weights", fingerprints(tensors))
        return
    # Shapes first: a broadcast into another shape would crash the process.
    require_equal("broadcasts its weights", _shapes(tensors))
    for value in tensors.values():
        if not value.is_meta:
            receive(value)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {n: f"{v.dtype} {tuple(v.shape)} {v.is_meta}" for n, v in tensors.items()}
