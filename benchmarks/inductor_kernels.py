"""Kernels and bytes of a block of the paper's 22B GPT, in the code that Inductor emits for a GPU.

No GPU and no Triton is needed: the functions of ``backend="inductor"`` are lowered for fake CUDA
tensors until the text of their kernels is there, which nothing compiles or runs.

    python -m benchmarks.inductor_kernels [--recompute none selective full] [--write]

A *pass* is one of Inductor's own kernels, a *product* one of cuBLAS. The bytes that they read and
write are compared with those of a single kernel for all passes of a function between the same
products, which would read each operand once and write only what other kernels read.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode

import sp_compiler
from benchmarks import inductor
from benchmarks.models import PAPER_SETUPS, PlainGPT
from benchmarks.pretended_gpu import until_written
from sp_compiler.inductor import fused, lowering
from sp_compiler.inductor.lowering import Traced

MODEL = "gpt-22b"
DTYPE = torch.bfloat16
DROPOUT = 0.1
DIRECTIONS = "forward", "backward"
# Smaller kernels (seeds, hashes of rows, sums of partial sums) cost a launch, but no traffic.
_SMALL = 2**20


@dataclass(frozen=True)
class Kernel:
    """A kernel that is launched.

    Attributes:
        name: in Inductor's scheduler.
        product: whether it is one of a library.
        accesses: bytes that it reads or writes, by buffer.
        written: the buffers among them that it writes.
        results: those among them that the function returns.
    """

    name: str
    product: bool
    accesses: Mapping[str, int]
    written: frozenset[str]
    results: frozenset[str]

    @property
    def bytes(self) -> int:
        """What it reads and writes, each buffer once."""
        return sum(self.accesses.values())


@dataclass(frozen=True)
class Counts:
    """Kernels of one or more functions; bytes are of one rank.

    Args:
        small: passes that touch less than a MiB.
        bytes: what all kernels read and write, each buffer once a kernel.
        once: the same if every chain of passes were one kernel.
        again: what passes read a second time, in another loop over the same row: of a cache, if
            a row fits.
    """

    products: int = 0
    passes: int = 0
    small: int = 0
    bytes: int = 0
    once: int = 0
    again: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Emitted:
    """What Inductor emits for one function.

    Attributes:
        kernels: in the order of their launches.
        sizes: bytes of each buffer.
        text: of the Python module that launches them, with that of the passes.
    """

    kernels: Sequence[Kernel]
    sizes: Mapping[str, int]
    text: str


def emit(traced: Traced) -> Emitted:
    """Return what Inductor emits for a traced function on a GPU."""
    return until_written(traced, _emitted)


def _emitted(graph: GraphLowering) -> Emitted:
    text, _ = graph.codegen()
    results = frozenset(graph.get_output_names())
    kernels = [_kernel(node, results) for node in graph.scheduler.nodes]
    kernels = [kernel for kernel in kernels if kernel.accesses]
    names = {name for kernel in kernels for name in kernel.accesses}
    sizes = {name: int(graph.get_numel(name)) * graph.get_dtype(name).itemsize for name in names}
    return Emitted(kernels, sizes, text.value)


def _kernel(node: BaseSchedulerNode, results: frozenset[str]) -> Kernel:
    written = frozenset(node.get_buffer_names())
    product = isinstance(node.node, ir.ExternKernel)
    accesses: Mapping[str, int] = node.get_read_write_buffer_accesses(True, True)
    if isinstance(node.node, ir.ExternKernel):
        # Inductor counts the whole of a buffer of which a product reads a part.
        operands: list[Any] = [*node.node.inputs, node.node]
        accesses = collections.Counter()
        for operand in operands:
            accesses[operand.get_name()] += _view_bytes(operand)
    return Kernel(node.get_name(), product, accesses, written, written & results)


def _view_bytes(operand: Any) -> int:
    layout = operand.get_layout()
    numel = 1
    # A dim of stride 0 is in memory once.
    for size, stride in zip(layout.size, layout.stride, strict=True):
        numel *= int(size) if stride != 0 else 1
    assert isinstance(layout, ir.Layout)
    return int(numel * layout.dtype.itemsize)


def count(emitted: Emitted) -> Counts:
    """Count the kernels of one function, and what they read and write."""
    passes = [kernel for kernel in emitted.kernels if not kernel.product]
    products = [kernel for kernel in emitted.kernels if kernel.product]
    return Counts(
        products=len(products),
        passes=len(passes),
        small=sum(kernel.bytes < _SMALL for kernel in passes),
        bytes=sum(kernel.bytes for kernel in emitted.kernels),
        once=sum(kernel.bytes for kernel in products) + _once(emitted.kernels, emitted.sizes),
        again=_read_again(emitted),
    )


def _once(kernels: Sequence[Kernel], sizes: Mapping[str, int]) -> int:
    """Bytes of all passes, if those between the same products were one kernel."""
    writer = {name: kernel for kernel in kernels for name in kernel.written}
    level: dict[str, int] = {}
    for kernel in kernels:  # in order of launch
        before = [writer[name] for name in kernel.accesses if name in writer]
        level[kernel.name] = max(
            (level[each.name] + each.product for each in before if each is not kernel), default=0
        )
    total = 0
    passes = [kernel for kernel in kernels if not kernel.product]
    for found in {level[kernel.name] for kernel in passes}:
        members = [kernel for kernel in passes if level[kernel.name] == found]
        # Parts of one buffer are added up, but no byte counts twice.
        read: collections.Counter[str] = collections.Counter()
        for each in members:
            read.update({n: size for n, size in each.accesses.items() if n not in each.written})
        own = {name for each in members for name in each.written}
        read_elsewhere = {n for each in kernels if each not in members for n in each.accesses}
        total += sum(min(size, sizes[name]) for name, size in read.items() if name not in own)
        total += sum(
            size
            for each in members
            for name, size in each.accesses.items()
            if name in each.written and (name in read_elsewhere or name in each.results)
        )
    return total


def _read_again(emitted: Emitted) -> int:
    """Bytes that passes read in a second loop over what they reduce."""
    sizes: dict[str, int] = {}
    for kernel in emitted.kernels:
        for name, size in kernel.accesses.items():
            sizes[name] = max(size, sizes.get(name, 0))
    loops: dict[str, Mapping[str, int]] = {}
    for name, parameters, body in re.findall(
        r"^def (triton_\w+)\(([^)]*)\):\n(.*?)^'''", emitted.text, re.MULTILINE | re.DOTALL
    ):
        found = re.split(r"^ +for .*$", body, flags=re.MULTILINE)[1:]
        pointers = [each.split(":")[0].strip() for each in parameters.split(",")]
        loops[name] = {
            pointer: sum(f"tl.load({pointer} +" in loop for loop in found) for pointer in pointers
        }
    again = 0
    launches = re.findall(r"^ +(triton_\w+)\.run\(([^)]*)\)", emitted.text, re.MULTILINE)
    for kernel, arguments in launches:
        for buffer, times in zip(arguments.split(", "), loops[kernel].values(), strict=False):
            again += max(0, times - 1) * sizes.get(buffer, 0)
    return again


def block(recompute: str, dropout: float) -> dict[str, Counts]:
    """The kernels of a block of the 22B GPT on one of eight ranks, by direction."""
    setup = PAPER_SETUPS[MODEL]
    traced: dict[str, Traced] = {}

    def kept(function: Callable[..., Any], *arguments: Any) -> Traced:
        traced[function.__qualname__] = found = lowering.trace(function, *arguments)
        return found

    with torch.device("meta"):
        size = dataclasses.replace(
            setup.model, num_layers=2, dropout=dropout, attention_dropout=dropout
        )
        model = PlainGPT(size).to(DTYPE)
    ids = torch.zeros(setup.micro_batch, setup.sequence_length, dtype=torch.int64)
    with mock.patch.object(fused, "trace", kept):
        sp_compiler.plan(
            model,
            ((), {"input_ids": ids, "labels": ids}),
            tp=setup.tensor_parallel,
            backend="inductor",
            recompute=recompute,
        )
    counts = dict.fromkeys(DIRECTIONS, Counts())
    for name, each in traced.items():
        region, _, function = name.partition(".")
        direction = function.rpartition("_")[0]
        # If a layer also recomputes for another one, other functions run instead of these.
        if region == "Block" and direction in counts:
            counts[direction] += count(emit(each))
    return counts


def main() -> None:
    """Count for the given policies; print a table, keep it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recompute", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [*((recompute, DROPOUT) for recompute in options.recompute), ("none", 0.0)]
    rows = [
        {
            "recompute": recompute,
            "dropout": dropout,
            "direction": direction,
            **dataclasses.asdict(counts),
        }
        for recompute, dropout in cases
        for direction, counts in block(recompute, dropout).items()
    ]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.write:
        inductor.KERNELS.write_text(json.dumps(rows, indent=1) + "\n")
        inductor.PAGE.write_text(inductor.page(json.loads(inductor.FILE.read_text())))


if __name__ == "__main__":
    main()
