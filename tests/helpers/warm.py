"""Preloaded last by the process whose forks are ranks: what every rank would do again by itself.

A first compilation imports three hundred modules and fills the caches of torch and sympy, and the
garbage collector looks at, and so copies, a million objects that live to the end: together half of
the time of a rank that compiles one small model.
"""

from __future__ import annotations

import contextlib
import gc
import warnings

import torch
import tqdm

from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from tests.helpers.old_objects import spare_old_objects
from tests.models import zoo


def _warm_up() -> None:
    # With an accelerator a backward starts threads of autograd, after which no fork may run one.
    if torch.accelerator.current_accelerator() is not None:
        return
    # Its thread, which watches progress bars, would not be there in the forks.
    tqdm.tqdm.monitor_interval = 0
    # If nothing compiles, the tests say so: an error here would only end the process.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        build(zoo.build("gpt2", layers=1), (), zoo.inputs("gpt2"), CompileOptions(tp=2))


_warm_up()
gc.collect()
spare_old_objects()
