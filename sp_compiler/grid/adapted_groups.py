"""Changes in the behaviour of FSDP2's parameter groups in a compiled module.

Methods of each of these groups are replaced; other groups in the process are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.utils import _pytree as pytree


def adapt(group: Any) -> None:
    """Adapt an FSDP group, once.

    - It gathers into normal tensors, even for a call in ``inference_mode``: it keeps the tensors of
      the first call, and could gather into inference tensors only in that mode.
    - Its autograd node before a block passes a missing gradient on as it is. In eager code, a block
      that a loss does not reach has no path to the loss. Here the region after our layers returns
      all outputs, and connects each layer to the loss. If missing gradients became zeros, layers
      would compute gradients of zeros, and weight decay would change their parameters.
    """
    for name in ("lazy_init", "unshard", "wait_for_unshard"):
        _replace(group, name, _outside_of_inference_mode)
    _replace(group, "_register_post_backward_hook", _without_zeros)


def _replace(group: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if name not in vars(group):
        setattr(group, name, by(getattr(group, name)))


def _outside_of_inference_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def _without_zeros(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = register(*args, **kwargs)
        for value in pytree.tree_leaves(inputs):
            node: Any = value.grad_fn if isinstance(value, Tensor) else None
            if getattr(node, "_forward_cls", None) is RegisterPostBackwardFunction:
                node.set_materialize_grads(False)
                break  # all inputs have the same node
        return inputs

    return run
