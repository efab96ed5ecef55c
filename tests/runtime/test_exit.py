"""The end of a process whose collectives run on gloo's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys, threading
from sp_compiler.runtime.watched_collectives import let_gloo_finish

let_gloo_finish()
sys.setswitchinterval(100)  # the thread gets the interpreter when this one gives it away
arrived = threading.Lock()
arrived.acquire()

def finish():
    with arrived:
        print("finished")

threading.Thread(target=finish, daemon=True).start()
arrived.release()
"""


@pytest.mark.slow
def test_threads_finish_before_the_interpreter() -> None:
    """Like gloo's, which needs the interpreter to free the tensors of the last collective."""
    command = [sys.executable, "-c", _SCRIPT]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == "finished\n"
