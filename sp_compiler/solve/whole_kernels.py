"""Merge the tasks that a backend launches as one kernel into one task.

An order that separates what is fused would move intermediate values through memory, which the times
of single tasks do not show.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from sp_compiler.solve.block_schedule import Block, Memory, Task


def whole_kernels(block: Block, kernels: Sequence[Hashable | None]) -> tuple[Block, list[range]]:
    """Return ``block`` with each kernel as one task, and the range of original tasks of each.

    The peak computed for an order is at least the true one, and the given order's does not grow.

    Args:
        kernels: for each task the kernel that it is part of, or ``None``. Tasks of a kernel that do
            not follow each other directly stay separate.
    """
    runs: list[range] = []
    for position, kernel in enumerate(kernels):
        if runs and kernel is not None and kernel == kernels[position - 1]:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    if len(runs) == len(block.tasks):
        return block, runs
    whole = _with_runs(block, runs)
    # A storage that others read too is held until the kernel ends, though in the given order it may
    # die earlier. If that would be the peak, the tasks stay separate.
    memory, kept = Memory(whole), []
    for index, run in enumerate(runs):
        is_peak = memory.run(index) > block.given_bytes
        kept += [range(i, i + 1) for i in run] if is_peak else [run]
    return (whole if kept == runs else _with_runs(block, kept)), kept


def _with_runs(block: Block, runs: Sequence[range]) -> Block:
    """Return ``block`` with the tasks of each run as one."""
    number = {position: index for index, run in enumerate(runs) for position in run}
    readers = _readers(block)
    tasks = []
    for run in runs:
        task = block.tasks[run.start] if len(run) == 1 else _whole(block, run, readers)
        needs = dict.fromkeys(number[needed] for needed in task.needs if needed not in run)
        start = None if task.waits_for is None else number[task.waits_for]
        tasks.append(replace(task, needs=tuple(needs), waits_for=start))
    return replace(block, tasks=tuple(tasks))


def _readers(block: Block) -> list[set[int]]:
    """Return the tasks that read a storage, by storage."""
    readers: list[set[int]] = [set() for _ in block.storage_bytes]
    for position, task in enumerate(block.tasks):
        for storage in task.reads:
            readers[storage].add(position)
    return readers


def _whole(block: Block, run: range, readers: Sequence[set[int]]) -> Task:
    """Return one task that does what those of ``run`` do, one after another."""
    members = [block.tasks[position] for position in run]
    makes = dict.fromkeys(storage for task in members for storage in task.makes)
    reads = dict.fromkeys(storage for task in members for storage in task.reads)
    # A storage that only they read dies between them, in whatever order the other tasks run.
    last = {
        storage: max(readers[storage], default=position)
        for position, task in zip(run, members, strict=True)
        for storage in (*task.makes, *task.reads)
        if storage not in block.returned and readers[storage] <= set(run)
    }
    more_bytes = most_bytes = 0
    for position, task in zip(run, members, strict=True):
        most_bytes = max(most_bytes, more_bytes + task.run_bytes)
        more_bytes += sum(block.storage_bytes[made] for made in task.makes)
        freed = (storage for storage, dies in last.items() if dies == position)
        more_bytes -= sum(block.storage_bytes[storage] for storage in freed)
    inside = makes.keys() & last.keys()
    return Task(
        needs=tuple(needed for task in members for needed in task.needs),
        time_us=sum(task.time_us for task in members),
        makes=tuple(storage for storage in makes if storage not in inside),
        reads=tuple(storage for storage in reads if storage not in inside),
        run_bytes=most_bytes,
    )
