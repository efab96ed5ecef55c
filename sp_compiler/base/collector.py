"""Less work for the garbage collector while a model is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_skipped() -> Iterator[None]:
    """Context in which the garbage collector only visits objects that are made in it.

    A compilation makes so many objects that the collector would traverse all modules and models of
    the process again and again: a fifth of the time of a small model's compilation, two fifths of
    the time to import Inductor and load its kernels.
    """
    if gc.get_freeze_count():  # frozen by an outer context, or by a user
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
