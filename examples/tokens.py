"""Text files as windows of tokens, for the training program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer


@dataclass
class Tokens:
    """Windows of a text: the last twentieth is for evaluation, the rest is shuffled per epoch.

    Which windows a step reads depends on how many were read before, and on nothing else.
    """

    windows: Tensor
    seed: int
    order: tuple[int, Tensor] | None = None  # epoch and its permutation, drawn last

    @staticmethod
    def read(files: Sequence[Path], tokenizer: str, length: int, seed: int) -> Tokens:
        """All files, one behind the other, in windows of ``length``; ``tokenizer`` may be bytes."""
        texts = [path.read_bytes() for path in files]
        if tokenizer == "bytes":
            ids = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        else:
            encode = AutoTokenizer.from_pretrained(tokenizer)
            read = (encode(t.decode(errors="replace"), return_tensors="pt") for t in texts)
            ids = torch.cat([encoded.input_ids[0] for encoded in read])
        count = len(ids) // length
        if count < 20:
            raise SystemExit(
                f"{len(ids)} tokens are {count} windows of {length}: give more text, "
                "or a smaller --sequence-length"
            )
        return Tokens(ids[: count * length].view(count, -1), seed)

    def training(self, first: int, count: int) -> Tensor:
        """Windows ``first`` to ``first + count`` of the training, which goes round."""
        total = len(self.windows) - len(self.windows) // 20
        chosen = []
        for position in range(first, first + count):
            epoch, index = divmod(position, total)
            chosen.append(self._order(epoch, total)[index])
        return self.windows[torch.stack(chosen)].long()

    def evaluation(self, first: int, count: int) -> Tensor:
        """As many of those that are held out, in order."""
        held_out = self.windows[-(len(self.windows) // 20) :]
        return held_out[torch.arange(first, first + count) % len(held_out)].long()

    def _order(self, epoch: int, total: int) -> Tensor:
        if self.order is None or self.order[0] != epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self.order = epoch, torch.randperm(total, generator=generator)
        return self.order[1]
