"""Code between collectives, compiled by Inductor and called from the generated text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from sp_compiler.codegen.backends import LoadedProgram
from sp_compiler.codegen.module_text import (
    CompiledRegion,
    load_classes,
    module_source,
    region_text,
)
from sp_compiler.codegen.nesting import Apart
from sp_compiler.inductor.fused import Fused, TracingRank, first_line
from sp_compiler.inductor.split import IMPORT, split_method
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.rewriting import fake_mode_of


def compile_regions(regions: Sequence[CompiledRegion], products: bool = True) -> LoadedProgram:
    """Load the classes of all regions from one text, and trace the functions for Inductor.

    Kernels are compiled at the first call: a plan needs none, and a module may still be moved to
    another device. Without ``products``, matmuls run uncompiled.
    """
    split = functools.partial(split_method, products=products)
    apart: Apart = "collectives" if products else "products"
    texts = {
        each.region.name: region_text(
            each.region, each.joint, each.partitioned, each.paths, split, apart
        )
        for each in regions
    }
    source = module_source(texts.values(), (IMPORT,))
    namespace = load_classes(source, texts.values())
    # Loaded before tracing, because the functions of the text are traced.
    codes = {name: namespace[text.name] for name, text in texts.items()}
    # For the plan: nothing else shows what is not compiled, because it runs all the same.
    notes: list[str] = []
    kernels: dict[str, list[Fused]] = {}
    for each in regions:
        code = codes[each.region.name]
        # Once per region, all functions in turn: what one returns is given to the next.
        error = _trace(each.partitioned, code, each.world_size)
        functions = _compiled_functions(code)
        kernels[each.region.name] = [fused for fused in functions if fused.is_traced]
        if each.partitioned.loss is not None:
            for fused in _compiled_functions(code, of="backward"):
                fused.is_rare = True  # loss_backward runs instead
        for fused in functions:
            if not fused.is_traced:
                reason = fused.reason or error
                fused.run_as_written(reason)
                notes.append(f"{fused.name} runs uncompiled: {reason}")
    names = {name: text.names for name, text in texts.items()}
    return LoadedProgram(source, codes, names, tuple(notes), kernels)


def _compiled_functions(code: Any, of: str = "") -> list[Fused]:
    """Return the parts that Inductor compiles, of all methods or of one."""
    return [
        value.__func__
        for name, value in vars(code).items()
        if isinstance(value, staticmethod)
        and isinstance(value.__func__, Fused)
        and of in ("", name.rpartition("_")[0])
    ]


def _trace(parts: Partitioned, code: Any, world_size: int) -> str:
    """Run ``code`` once on the fake tensors of the graphs; return the error's text, "" if there was
    none."""
    # The mode of the graphs: tensors of two fake modes do not mix.
    mode = fake_mode_of(parts.forward)
    try:
        with mode, torch.no_grad():
            inputs = _inputs(parts.forward)
            rank = torch.zeros((), dtype=torch.int64, device=_device_of(inputs))
            tp = TracingRank(rank, world_size)
            _, saved = code.forward(tp, *inputs)
            if parts.backward is not None:
                code.backward(tp, saved, *_inputs(parts.backward)[len(saved) :])
            if parts.ahead is not None:
                recomputed = list(code.recompute(tp, saved))
                tangents = _inputs(parts.ahead.rest)[len(saved) + len(recomputed) :]
                code.backward_rest(tp, saved, list(recomputed), *tangents)
                code.backward_ahead(tp, saved, recomputed, saved, *tangents)
            if parts.split is not None:
                num_saved = len(parts.saved)
                tangents = _inputs(parts.split.inputs)[num_saved:]
                _, rest = code.backward_inputs(tp, saved, *tangents)
                if parts.split.both is not None:
                    code.backward_behind(tp, saved, list(rest), *tangents)
                code.backward_weights(tp, list(rest))
            if parts.loss is not None:
                code.loss_backward(tp, saved, *_inputs(parts.loss.backward)[len(saved) :])
    except Exception as error:  # a statement between the functions may need real values
        return first_line(error)
    return ""


def _device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device where functions of ``inputs`` run."""
    # Not that of the first input, which may be a scalar on the CPU: if the rank were traced on the
    # CPU, Inductor's code would read it on the host, which would wait for the real one on the GPU.
    devices = [x.device for x in inputs if isinstance(x, Tensor)]
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _inputs(graph: Graph) -> list[Any]:
    return _detached([node.meta["val"] for node in graph.find_nodes(op="placeholder")])


def _detached(values: Sequence[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, Tensor) else value for value in values]
