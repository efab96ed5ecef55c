"""Parameters of FSDP2 that stay gathered for many backwards, and whose gradients are reduced once.

A pipeline runs its stage forward and backward for one microbatch after the other. Gathering and
reducing for each of them would multiply the traffic by their number::

    unshard all | F0 F1 B0 F2 B1 B2 | reduce-scatter, all-reduce | reshard | all-reduce over tp

The last all-reduce is over this rank's shards of gradients that are partial sums; see
:mod:`~sp_compiler.grid.fully_sharded`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from sp_compiler.grid.fully_sharded import FullySharded, drop_gathered_gradients, param_groups


class GatheredParameters:
    """The parameters that FSDP2 manages in a module that is never called itself.

    Args:
        root: module with ``fully_shard`` or ``replicate`` applied, with
            ``reshard_after_forward=False``.
        fsdp: its parameters.
    """

    def __init__(self, root: nn.Module, fsdp: FullySharded) -> None:
        self._root: Any = root
        self._fsdp = fsdp
        self._groups = list(param_groups(root.modules()))

    @contextlib.contextmanager
    def gathered(self, *, reduce: bool) -> Iterator[None]:
        """Context in which parameters are gathered; at its end their gradients are reduced, if
        asked.

        After an error inside, nothing is reduced, and unreduced gradients are dropped.
        """
        state = self._root._get_fsdp_state()
        # FSDP does this in the root's first call, which never comes. A block would do it only for
        # itself, and as a root would wait only for its own communication.
        state._lazy_init()
        # The blocks' own hooks neither reduce nor reshard.
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)
        for group in self._groups:
            # One after the other, so that only one group has a gathered copy in addition.
            group.unshard()
            group.wait_for_unshard()
        try:
            yield
            if reduce:
                self._root.set_requires_gradient_sync(True)
        except BaseException:
            for group in self._groups:
                drop_gathered_gradients(group)
            raise
        finally:
            self._root.set_reshard_after_backward(True)
            # As torch.distributed.pipelining does, because no backward runs hooks that would do it.
            for group in reversed(self._groups):
                group.post_backward()
            # From torch 2.15 on a backward through FSDP's hooks decides whether the callback ends
            # the step, or ``finalize_backward`` does; earlier ones do not read this.
            state._state_ctx.manual_backward_finalization_active = False
            state._root_post_backward_final_callback()
            self._fsdp.finish_reduction()
