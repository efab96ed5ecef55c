"""Folding of unchanged nodes far from a change and of repeated layers.

In a program a repeated layer is one graph. A flat graph (an exported model, or a graph before
outlining) has its nodes once per layer, so the same differences repeat in each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from sp_compiler.graph_diff.data import Entry, Equal, Item, Repeat

# A fold of fewer nodes takes more space than it saves.
_LEAST_EQUAL = 2
# A repetition that hides fewer nodes is not a layer, but for example keys and values that are
# treated the same way.
_LEAST_REPEATED = 6
# Longest layer, in nodes, that is searched for: the search takes this many comparisons per node.
_LONGEST_REPEAT = 400


def folded(nodes: Sequence[Entry], context: int | None) -> list[Item]:
    """Return ``nodes`` with repetitions and unchanged runs folded.

    Args:
        nodes: of one section, in order.
        context: number of unchanged nodes to show on either side of a change, ``None`` for all.
    """
    return list(_repeats(list(_equal_runs(nodes, context))))


def _equal_runs(nodes: Sequence[Entry], context: int | None) -> Iterator[Entry | Equal]:
    changed = [index for index, entry in enumerate(nodes) if entry.kind != "unchanged"]
    if context is None:
        yield from nodes
        return
    shown = {
        near
        for index in changed
        for near in range(max(0, index - context), min(len(nodes), index + context + 1))
    }
    run: list[Entry] = []
    for index, entry in enumerate(nodes):
        if index not in shown:
            run.append(entry)
            continue
        yield from _run(run)
        run = []
        yield entry
    yield from _run(run)


def _run(entries: list[Entry]) -> Iterator[Entry | Equal]:
    if len(entries) >= _LEAST_EQUAL:
        yield Equal(tuple(entries))
    else:
        yield from entries


def _repeats(items: list[Entry | Equal]) -> Iterator[Item]:
    """Fold runs of items that repeat, apart from the numbers in names."""
    # Texts become numbers, because each is compared with hundreds of others.
    numbers: dict[str, int] = {}
    keys = [numbers.setdefault(_signature(item), len(numbers)) for item in items]
    index = 0
    while index < len(items):
        length, count = _longest_repeat(keys, index)
        parts = [
            tuple(items[start : start + length])
            for start in range(index, index + length * count, length)
        ]
        hidden = length * (count - 1)
        # Unchanged layers are folded as one run, which is more informative than a repetition.
        differs = any(isinstance(item, Entry) and item.kind != "unchanged" for item in parts[0])
        if hidden >= _LEAST_REPEATED and differs:
            yield Repeat(parts[0], tuple(parts[1:]))
        else:
            yield items[index]
            length = count = 1
        index += length * count


def _longest_repeat(keys: Sequence[int], start: int) -> tuple[int, int]:
    """Return (length, count) of the repetition at ``start`` that covers the most nodes; (1, 1) if
    there is none."""
    best = (1, 1)
    for length in range(1, min(_LONGEST_REPEAT, (len(keys) - start) // 2) + 1):
        # One comparison of numbers rules out nearly every length.
        if keys[start] != keys[start + length]:
            continue
        part = keys[start : start + length]
        count = 1
        while keys[start + count * length : start + (count + 1) * length] == part:
            count += 1
        # If several cover the same, take the shortest, which comes first: one layer, not two.
        if count > 1 and count * length > best[0] * best[1]:
            best = (length, count)
    return best


def _signature(item: Entry | Equal) -> str:
    """Text that is equal for the same node of two layers: names lose their numbers."""
    entries = item.entries if isinstance(item, Equal) else (item,)
    # A folded run differs from a single node, even if its text is the same.
    texts = [type(item).__name__]
    for entry in entries:
        changes = " ".join(f"{c.field} {c.before} -> {c.after}" for c in entry.changes)
        texts.append(f"{entry.kind} {entry.op} {entry.text} {changes}")
    # Only in names: "%linear_12" and "%p_layers_3_weight", not in the sizes of "f32[2, 16]".
    without_numbers = partial(re.sub, r"_?\d+", "")
    return re.sub(r"(%|placeholder\[)\w+", lambda name: without_numbers(name[0]), "\n".join(texts))
