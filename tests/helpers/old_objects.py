"""Keep the garbage collector from what lives as long as the process does."""

from __future__ import annotations

import gc
from unittest import mock

# Every compilation asks whether somebody has frozen objects, and the answer counts the frozen ones:
# 40 ms each time, a seventh of the time of all tests.
SOME_ARE_FROZEN = mock.patch.object(gc, "get_freeze_count", return_value=1)


def spare_old_objects() -> None:
    """Spare the garbage collector the 700,000 objects of torch, transformers and the tests.

    They live to the end. Looking at them again in every full collection took an eighth of the
    time of all tests; graphs are cycles, so that collections are frequent here. Forks inherit it.
    """
    gc.freeze()
    SOME_ARE_FROZEN.start()
    gc.set_threshold(10_000, 20, 20)
