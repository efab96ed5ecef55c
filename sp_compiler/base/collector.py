"""The garbage collector while a model is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_skipped() -> Iterator[None]:
    """Context in which the garbage collector looks at objects that are made in it only.

    A compilation makes so many that the collector would go through all modules and models of the
    process again and again: a fifth of the time of a small model's compilation, two fifths of the
    time in which Inductor is imported and its kernels are loaded.
    """
    if gc.get_freeze_count():  # by a context around this one, or by a user, whose choice it is
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
