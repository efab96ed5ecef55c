"""Fingerprints of tensors: 64 bits each, computed on the tensor's device, without a copy to the
host.

They detect differing bits; they do not protect against an adversary.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

# Eight bytes each. A chunk of this size stays in a cache, and needs little memory.
_WORDS_AT_A_TIME = 1 << 18
# Of one input, in every call: 16 rows of 256 token ids, read in less than 10 us.
_LEADING_BYTES = 1 << 15
# Odd constants of splitmix64, as signed integers.
_PER_WORD = -7046029254386353131
_MIX = -4658895280553007687


def strided(value: Tensor) -> Tensor:
    """Return ``value`` as a dense tensor: missing zeros filled in, conjugates computed."""
    detached = value.detach()
    dense = detached if detached.layout is torch.strided else detached.to_dense()
    return dense.resolve_conj().resolve_neg()


def leading_digest(value: Tensor) -> int:
    """Return 32 bits that depend on about the first 32 KiB of a plain dense tensor on the CPU.

    The cost does not depend on the size: at most about that much is copied.
    """
    part = strided(value)
    while part.nbytes > _LEADING_BYTES:
        row = part.nbytes // len(part)
        part = part[: _LEADING_BYTES // row] if row <= _LEADING_BYTES else part[0]
    return zlib.crc32(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@torch.no_grad()
def fingerprint(value: Tensor) -> Tensor:
    """Return a 0-dim int64 tensor on the device of ``value`` that depends on all its elements.

    ``value`` must not be on meta. The fingerprints of two different tensors are equal with a
    probability of about 2^-60; order matters, shape and dtype do not.
    """
    data = strided(value).contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    num_words = data.numel() // 8
    # Storage offsets of views need not be multiples of eight bytes, which view() requires.
    words = (data if data.storage_offset() % 8 == 0 else data.clone())[: 8 * num_words]
    for start, chunk in enumerate(words.view(torch.int64).split(_WORDS_AT_A_TIME)):
        total += _mixed(chunk, start * _WORDS_AT_A_TIME)
    rest = data[8 * num_words :]
    return total + _mixed(rest.to(torch.int64), num_words)


def combined(fingerprints: list[Tensor]) -> Tensor:
    """Return one fingerprint of several, in this order."""
    return fingerprint(torch.stack(fingerprints))


def _mixed(words: Tensor, offset: int) -> Tensor:
    """Sum over words, each mixed with its position, modulo 2 to the 64."""
    positions = torch.arange(offset, offset + words.numel(), device=words.device)
    mixed = positions.add_(1).mul_(_PER_WORD).bitwise_xor_(words)
    # Multiplication leaves low bits weak; the shift brings higher bits down to them.
    mixed = mixed.mul_(_MIX)
    mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_PER_WORD)
    return mixed.sum()
