"""The interface of a recompute policy: its decision about one forward node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from sp_compiler.passes.memory.forward_facts import ForwardFacts

Tag = tuple[Literal["save", "offload", "recompute"], str]
"""What happens to a node, and why in a few words; policies do not offload."""


@dataclass(frozen=True)
class RecomputePolicy:
    """One file of :mod:`sp_compiler.passes.memory.policies`.

    Attributes:
        decide: called for each forward node whose tag depends on the policy.
        saved_sbh: what a layer of GPT-3 175B saves with regenerated masks, in units of s*b*h bytes;
            policies are sorted by it.
        last_region: name of the policy that replaces this one in the region that runs last, if
            everything that it saves would exist at the same time anyway: backward starts there, so
            values that were not saved are recomputed at once. "" if there is none.
        seeks: the reason of the tags that distinguish this policy; if no node has such a tag, a
            note says that it saves nothing. "" if it always recomputes something.
        chunks_rows: whether logits and attention may be recomputed, so that they can run in chunks.
    """

    decide: Callable[[Node, ForwardFacts], Tag]
    saved_sbh: float
    last_region: str = ""
    seeks: str = ""
    chunks_rows: bool = True
