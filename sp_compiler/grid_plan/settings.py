"""One model compiled for the many settings that a search compares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sp_compiler.compiler import Compilation, to_program
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.runner import PassRunner, running_passes
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.trace.export import capture


def build_settings(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Sequence[CompileOptions],
) -> list[PlannedProgram]:
    """Compile ``model`` for each of ``settings``.

    They may differ only in ``tp``, ``loss_only``, ``recompute`` and ``split_backward``. The model
    is captured once, which takes most of the time, and sharded once per run of equal ``tp`` and
    ``loss_only``.
    """
    programs: list[PlannedProgram] = []
    with running_passes(open_dims=False):
        captured = capture(model, args, kwargs)
        outlined = {
            options.loss_only: to_program(captured.copy(), options)
            for options in {options.loss_only: options for options in settings}.values()
        }
        for _, group in itertools.groupby(settings, key=lambda each: (each.tp, each.loss_only)):
            sharded_alike = list(group)
            first = sharded_alike[0]
            # The graphs between the passes of a setting are not shown.
            run = PassRunner(keep_graphs=False)
            compilation = Compilation(outlined[first.loss_only], first, run=run)
            for options in sharded_alike:
                compiled = compilation.finish(options)
                plan = make_plan(compiled, options, type(model).__name__)
                programs.append(PlannedProgram.of(compiled, plan))
    return programs
