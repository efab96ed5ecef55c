"""A stage of the pipeline whose waits for messages are watched."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from sp_compiler.pipeline_parallel.lean_stage import LeanStage
from sp_compiler.pipeline_parallel.messages import Messages


class WatchedStage(LeanStage):
    """A stage whose waits for messages are watched; ``messages`` may be ``None``."""

    def __init__(self, *args: Any, messages: Messages | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._messages = messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As of the base class."""
        return self._watched(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """As of the base class."""
        self._leave_sent()
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """As of the base class."""
        self._leave_sent()
        super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """As of the base class."""
        self._leave_sent()
        super().backward_weight_one_chunk(*args, **kwargs)

    def _leave_sent(self) -> None:
        if self._messages is not None:
            self._messages.leave_sent()

    def _watched(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return ops if self._messages is None else self._messages.watch(ops)
