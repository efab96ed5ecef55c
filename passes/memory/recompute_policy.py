"""The form of a recompute policy: what it decides of one forward node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from sp_compiler.passes.memory.forward_facts import ForwardFacts

Tag = tuple[Literal["save", "recompute"], str]
"""Fate of a node, and why in a few words."""


@dataclass(frozen=True)
class RecomputePolicy:
    """One file of :mod:`sp_compiler.passes.memory.policies`.

    Attributes:
        decide: asked for each forward node that is not settled for every policy alike.
        saved_sbh: what a layer of GPT-3 175B saves with regenerated masks, in units of s*b*h bytes;
            puts the policies in order.
        last_region: name of the policy that takes this one's place in the region that runs last,
            where what it saves would exist all at the same time anyway: backward starts there, so
            what was not saved is recomputed at once. "" where there is none.
        chunks_losses: whether logits may be recomputed, so that a loss head can run in chunks.
    """

    decide: Callable[[Node, ForwardFacts], Tag]
    saved_sbh: float
    last_region: str = ""
    chunks_losses: bool = True
