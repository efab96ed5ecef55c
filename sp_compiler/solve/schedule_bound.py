"""A time below which no order of a block's tasks can end."""

from __future__ import annotations

from bisect import insort

from sp_compiler.solve.block_schedule import Block


def least_us(block: Block) -> float:
    """Return a lower bound on the time of any order of ``block``.

    It is the largest of four: the time of all kernels; of all collectives and whatever must run
    before the first and after the last; of the longest path; of collectives in a chain and all
    kernels that must run before, between and after them.
    """
    from_start_us: list[float] = []  # to where the task begins, by the longest path
    for task in block.tasks:
        ends = (
            from_start_us[needed] + block.tasks[needed].time_us + block.tasks[needed].link_us
            for needed in task.needs
        )
        from_start_us.append(max(ends, default=0.0))
    sent = [(i, task.link_us) for i, task in enumerate(block.tasks) if task.link_us]
    link_us = sum(own_us for _, own_us in sent)
    link_us += min((from_start_us[i] for i, _ in sent), default=0.0)
    link_us += min((block.to_end_us[i] - own_us for i, own_us in sent), default=0.0)
    path_us = max(block.to_end_us, default=0.0)
    return max(block.compute_us, link_us, path_us, _longest_chain_us(block))


def _longest_chain_us(block: Block) -> float:
    longest_us = 0.0
    # Of each collective so far: the time until it arrives less that of the kernels that must run
    # before it, the time until it arrives, its start. Sorted, so that most are never examined.
    sent: list[tuple[float, float, int]] = []
    for start, task in enumerate(block.tasks):
        if not task.link_us:
            continue
        before_us = begins_us = block.kernels_us(block.before[start])
        for ahead_us, arrives_us, earlier in reversed(sent):
            # The kernels between the two are not among those before the earlier one: neither this
            # one nor the remaining ones can delay the start any further.
            if ahead_us + before_us <= begins_us:
                break
            behind = block.behind[block.wait_of.get(earlier, earlier)]
            if behind >> start & 1:
                between_us = block.kernels_us(behind & block.before[start])
                begins_us = max(begins_us, arrives_us + between_us)
        until_us = begins_us + task.link_us
        insort(sent, (until_us - before_us, until_us, start))
        behind = block.behind[block.wait_of.get(start, start)]
        longest_us = max(longest_us, until_us + block.kernels_us(behind))
    return longest_us
