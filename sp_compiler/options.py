"""The options of ``compile``, ``plan``, ``verify`` and ``torch.compile``, defined once."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from sp_compiler.base.errors import (
    ArgumentError,
    Function,
    expected_one_of,
    refusing_other_arguments,
)
from sp_compiler.base.pass_report import UserPass, checked_passes, pass_name
from sp_compiler.base.units import parse_bytes
from sp_compiler.cost.hardware import Hardware, hardware_of
from sp_compiler.ir.hints import Hint, checked_hints, hint_text

_ROOT = Path(__file__).parent


def _files_in(folder: Path, first: str) -> list[str]:
    """Names of the modules in ``folder``, with ``first`` at the start.

    They are the values of an option. They are listed without an import, because this module may not
    import passes.
    """
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    return sorted(names, key=lambda name: (name != first, name))


RECOMPUTE = (*_files_in(_ROOT / "passes" / "memory" / "policies", first="none"), "auto")
"""Values of ``recompute``: the name of a policy's file, or "auto", which needs a memory budget."""
BACKENDS = (*_files_in(_ROOT / "codegen" / "backends", first="eager"),)
"""Values of ``backend``: the name of a backend's file."""
Dropout = Literal["regenerate", "stored"]
Outputs = Literal["replicate", "shard", "auto"]
_CHUNKS = ("loss_chunks", "attention_chunks")
_SWITCHES = ("sequence_parallel", "offload", "overlap", "async_tp", "cuda_graphs", "strict")


class Options(TypedDict, total=False):
    """Keyword arguments of ``compile``, ``plan``, ``verify``; ``options`` of ``torch.compile``.

    Options:
        sequence_parallel: shard norms, dropouts and residuals by tokens (arXiv 2205.05198, section
            4.2.2).
        recompute: activations that backward recomputes instead of saving. ``"none"``: only gathers
            are repeated; ``"attention"``: the attention core (arXiv 2205.05198, section 5);
            ``"selective"``: also all pointwise and row-wise operators; ``"full"``: everything but
            the inputs of each block, except that the last block (the loss head), if it occurs once,
            uses ``"selective"``; ``"auto"``: per block, whatever gives the lowest estimated step
            time within ``memory_budget``.
        recompute_rest: in pipelines, the policy of the microbatches that do not fit. Each stage
            runs as many microbatches in flight with ``recompute`` as ``memory`` has room for, and
            the others with this policy, for example ``"none"`` and ``"full"`` (arXiv 2205.05198,
            appendix C). ``None``: all microbatches use ``recompute``.
        memory_budget: with ``"auto"``, the largest allowed peak of activations on a rank, as
            :func:`sp_compiler.plan` counts it, in bytes or as "12GiB".
        device_memory: instead of ``memory_budget``, a limit for everything that a step holds on a
            device: parameters, gradients, the two moments of ``torch.optim.AdamW`` and the peak of
            activations, in bytes or as "80GiB". With ``"auto"``, activations get what is left of
            it; otherwise a step that needs more raises an error. Leave room for what plans do not
            count: the device context, communication buffers, fragmentation.
        offload: with ``"auto"``, whether saved tensors may also be copied to the host's memory
            while the next layer runs, and fetched while its backward runs, up to what the link to
            the host can transfer in that time. The device then holds at most two layers' worth of
            these tensors. Not in pipelines.
        loss_chunks: number of chunks of rows in which logits are computed, turned into losses, and
            recomputed in backward, so that they never all exist at once; for models that do not
            return logits. ``"auto"``: chunks of at least 1024 rows, at most 16, if they lower the
            peak of a step by at least 5 %; no chunks with ``recompute="none"``.
        attention_chunks: number of chunks of queries in which attention with dropout computes its
            scores, probabilities and masks, and recomputes them in backward, so that the full score
            matrix never exists at once. ``"auto"``: chunks of at least 256 queries, at most 16, by
            the same rule.
        dropout: ``"regenerate"`` masks in backward, or save them (``"stored"``).
        overlap: during the collectives of a block, run its operators that do not depend on them:
            weight gradients, recomputation, independent branches, the other half batch.
        half_batches: run layers on the two halves of the batch, so that one half computes while the
            other communicates, in forward too (arXiv 2409.15241). A layer that mixes samples of
            the batch (batch norm, experts), or gets an odd batch, is not split, and the plan notes
            the reason. ``"auto"`` compiles both ways and splits if the estimated step takes at
            least 1 % less time, and no more memory than without or than ``memory_budget``. Each
            input size is compiled separately.
        async_tp: in forward, move the rows of one rank while those of another are multiplied, with
            the fused kernels of torch's symmetric memory, where this is estimated to be faster:
            matmuls of at least 4096 rows. Only CUDA devices with peer access (NVLink) have these
            kernels; others run the collective and the matmul one after the other.
        backend: ``"eager"`` runs the generated code as it is; ``"inductor"`` compiles, at the first
            call, the code between collectives (see docs/usage.md); ``"inductor_pointwise"`` only
            the code between collectives and matmuls; or the name of your own file in
            ``codegen/backends``.
        cuda_graphs: on CUDA devices, record forward and backward of a step in a CUDA graph each,
            once two steps with inputs of the same sizes have run, and replay them in later steps:
            the host then launches two graphs instead of thousands of kernels. Results are the same.
            Each size keeps the memory of its step, and gradients exist twice; see docs/usage.md.
            Not in pipelines, and not with FSDP2 or ``offload``, which need the host in every
            step.
        outputs: ``"replicate"``: full tensors on every rank; ``"shard"``: DTensors for outputs that
            the model computes sharded; ``"auto"``: ``"shard"`` if the model also returns its loss,
            else ``"replicate"``.
        nominal_tokens: number of tokens per batch for which placements are chosen; the example's
            number if that is larger.
        hints: placements of parameters that you choose, ``{"layers.*.mlp.up": Shard(0)}``. A key is
            the dotted name of a parameter as in ``model.named_parameters()``, or of a module, for
            its ``weight``; ``*``, ``?`` and ``[abc]`` are wildcards as in file names, which do not
            match a dot. A value is ``Shard(dim)`` or ``Replicate()`` of
            ``torch.distributed.tensor``, or :func:`sp_compiler.forbid` of these. Layers with
            different hints become different blocks. In a fused dim (q, k and v in one weight) each
            part is sharded.
        passes: your own passes, in order, each a function ``def my_pass(graph:
            torch.fx.GraphModule) -> sp_compiler.PassReport | int | None``. A pass rewrites in place
            the normalized graph of the unsharded model (ATen operators, values in
            ``meta["val"]``), before it is cut into blocks, and returns the number of rewrites or a
            report of them. New nodes need no ``meta["val"]`` or ``meta["requires_grad"]`` and may
            be any overload of an operator: both keys are filled in, and the graph is normalized
            again. The graph is then checked; :class:`sp_compiler.PassError` names the pass that
            broke it. Pass the same list on every rank.
        strict: raise :class:`sp_compiler.UnsupportedError` if a costly part of the model stays
            replicated: more than 1 % of the matrix FLOPs or of the parameter bytes, or any
            attention core, unless ``hints`` ask for it. Without ``strict``, ``compile`` and
            ``torch.compile`` warn once about each part, with the module, the reason and what to do;
            ``plan`` lists them; ``verify`` ignores them.
        hardware: device and links for which times are estimated; these decide placements, what
            ``"auto"`` recomputes, and a plan's times. The name of a profile ("a100", "a100-pcie",
            "cpu", "h100", "h200"), the path of a file written by :func:`sp_compiler.profile`, or a
            :class:`sp_compiler.Hardware`. Pass the same on every rank.
    """

    sequence_parallel: bool
    recompute: str
    recompute_rest: str | None
    memory_budget: int | str | None
    device_memory: int | str | None
    offload: bool
    loss_chunks: int | Literal["auto"]
    attention_chunks: int | Literal["auto"]
    dropout: Dropout
    overlap: bool
    half_batches: bool | Literal["auto"]
    async_tp: bool
    backend: str
    cuda_graphs: bool
    outputs: Outputs
    nominal_tokens: int
    hints: Mapping[str, Hint] | None
    passes: Sequence[UserPass]
    strict: bool
    hardware: str | Path | Hardware


def with_options(function: Function, explained: Collection[str] = ()) -> Function:
    """Expand ``**options: Unpack[Options]`` in the signature and docstring of ``function``.

    This way ``help`` and editors show names, defaults and meanings, which are defined only here.
    A call with an unknown name raises an error that suggests the nearest known one, unless
    ``function`` rejects that name itself (``explained``).
    """
    signature = inspect.signature(function)
    # Expanded in the signature that an editor shows; the function itself takes ``**options``.
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if each.default is MISSING else each.default,
            annotation=Options.__annotations__[each.name].__forward_arg__,
        )
        for each in fields(CompileOptions)
        if each.name in Options.__annotations__
    ]
    spelt_out = signature.replace(parameters=[*own, *options])
    checked = refusing_other_arguments(function, spelt_out, explained)
    meanings = (inspect.getdoc(Options) or "").partition("\n\n")[2]  # none under python -OO
    checked.__doc__ = f"{inspect.getdoc(function)}\n\n{meanings}"
    return checked


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Validated :class:`Options` with their defaults, the number of ranks and requirements of
    pipelines.

    Attributes:
        ep: number of ranks over which experts are divided.
        divisible: names of the parameters that may be divided over them; ``None``: all experts'.
        loss_only: see :mod:`sp_compiler.passes.loss_only`.
        tables_apart: see :func:`sp_compiler.passes.outline.outline`.
        split_backward: see :mod:`sp_compiler.passes.memory.split_backward`.
        layers_apart: whether FSDP2 gathers parameters layer by layer, so that a layer's backward
            cannot read the parameters of the layer before it.

    Raises:
        ArgumentError: a value outside what the field allows.
    """

    tp: int = 1
    ep: int = 1
    divisible: frozenset[str] | None = None
    sequence_parallel: bool = True
    recompute: str = "selective"
    recompute_rest: str | None = None
    memory_budget: int | str | None = None
    device_memory: int | str | None = None
    offload: bool = False
    loss_chunks: int | Literal["auto"] = "auto"
    attention_chunks: int | Literal["auto"] = "auto"
    dropout: Dropout = "regenerate"
    overlap: bool = True
    half_batches: bool | Literal["auto"] = False
    async_tp: bool = False
    backend: str = "eager"
    cuda_graphs: bool = False
    outputs: Outputs = "auto"
    nominal_tokens: int = 8192
    hints: Mapping[str, Hint] = field(default_factory=dict)
    passes: Sequence[UserPass] = ()
    strict: bool = False
    hardware: str | Path | Hardware = "h100"
    loss_only: bool = False
    tables_apart: bool = False
    split_backward: bool = False
    layers_apart: bool = False

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, RECOMPUTE)
        # Not "auto": a budget applies to all microbatches.
        check_choice("recompute_rest", self.recompute_rest, (None, *RECOMPUTE[:-1]))
        if self.recompute_rest is not None and self.recompute in ("auto", self.recompute_rest):
            raise ArgumentError(
                f"recompute_rest={self.recompute_rest!r} with recompute={self.recompute!r}: "
                'expected two different policies, for example "none" and "full"; not "auto"'
            )
        check_choice("dropout", self.dropout, get_args(Dropout))
        check_choice("backend", self.backend, BACKENDS)
        check_choice("outputs", self.outputs, get_args(Outputs))
        check_choice("half_batches", self.half_batches, (True, False, "auto"))
        for name in _SWITCHES:
            check_choice(name, getattr(self, name), (True, False))
        # Before anything is compiled, so that a wrong option is not reported as a failed pass.
        for name in ("tp", "nominal_tokens", *_CHUNKS):
            value = getattr(self, name)
            if name in _CHUNKS and value == "auto":
                continue
            # bool is a subclass of int: tp=True would mean one rank.
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                auto = ' or "auto"' if name in _CHUNKS else ""
                raise ArgumentError(f"{name}={value!r}: expected a positive int{auto}")
        # A frozen dataclass can normalize its own fields only this way.
        object.__setattr__(self, "hints", checked_hints(self.hints))
        object.__setattr__(self, "hardware", hardware_of(self.hardware))
        object.__setattr__(self, "passes", checked_passes(self.passes))
        self._check_memory()
        self._check_offload()
        self._check_cuda_graphs()
        if self.tables_apart and self.half_batches:
            raise ArgumentError(
                f"half_batches={self.half_batches!r}: pipelines and suggest() run microbatches, "
                "which are small already; leave it out, or use fewer microbatches"
            )

    def _check_memory(self) -> None:
        budget, device = self.memory_budget, self.device_memory
        if budget is not None and device is not None:
            raise ArgumentError(
                f"memory_budget={budget!r} with device_memory={device!r}: the first limits "
                "activations, the second the whole device; pass only one of them"
            )
        limited = budget is not None or device is not None
        # device_memory is a limit for every policy, but only "auto" adapts to it.
        if (self.recompute == "auto") != limited and device is None:
            raise ArgumentError(
                f"recompute={self.recompute!r} with memory_budget={budget!r}: "
                'recompute="auto" needs a memory_budget such as "12GiB" or a device_memory such as '
                '"80GiB", and a memory_budget needs recompute="auto"'
            )
        for name in ("memory_budget", "device_memory"):
            if getattr(self, name) is not None:
                parse_bytes(name, getattr(self, name))

    def _check_offload(self) -> None:
        if self.offload and self.recompute != "auto":
            raise ArgumentError(
                f"offload=True with recompute={self.recompute!r}: a budget decides what goes to "
                'the host; use recompute="auto" with memory_budget="12GiB" or device_memory="80GiB"'
            )
        if self.offload and (self.tables_apart or self.split_backward):
            raise ArgumentError(
                "offload=True: pipelines, and the plans that suggest() compares, keep the "
                "activations of their microbatches on the device; leave it out"
            )

    def _check_cuda_graphs(self) -> None:
        obstacles = {
            "offload=True": self.offload,
            "FSDP2 (pass fsdp=False to compile)": self.layers_apart,
            "pipelines and suggest()": self.tables_apart,
        }
        for what, is_there in obstacles.items():
            if self.cuda_graphs and is_there:
                raise ArgumentError(
                    f"cuda_graphs=True with {what}: that needs the host in every step, which a "
                    "CUDA graph does not replay; leave out one of them"
                )

    @classmethod
    def of(cls, tp: int, options: Options, *, in_stages: bool = False) -> CompileOptions:
        """Return the validated form of a user's ``options``; ``in_stages``: of a pipeline."""
        rest = options.get("recompute_rest")
        if rest is not None and not in_stages:
            raise ArgumentError(
                f"recompute_rest={rest!r}: only stages have several microbatches in flight; leave "
                "it out, or use sp_compiler.pipeline, or sp_compiler.plan with a mesh that has pp"
            )
        # Readers expect a mapping, even if no hint was given.
        values: dict[str, Any] = {**options, "hints": options.get("hints") or {}}
        return cls(tp=tp, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return what a user can set, as plain data: hints and passes as text, hardware by name."""
        asked = ("tp", "ep", *Options.__annotations__)
        return {
            **{name: getattr(self, name) for name in asked},
            "hardware": self.device.name,
            "hints": {key: hint_text(hint) for key, hint in self.hints.items()},
            "passes": list(map(pass_name, self.passes)),
        }

    def texts(self) -> dict[str, str]:
        """Option name to the text of its value, the same for equal values on every rank."""
        # All values of the hardware, not its name: two ranks may have measured their own.
        options = {**vars(self), **self.to_dict(), "hardware": self.hardware}
        # The order of hints has no meaning, and may differ between ranks.
        options["hints"] = dict(sorted(options["hints"].items()))
        return {name: repr(value) for name, value in options.items()}

    @property
    def device(self) -> Hardware:
        """The profile of ``hardware``."""
        return hardware_of(self.hardware)

    @property
    def fuses(self) -> bool:
        """Whether ``backend`` fuses elementwise operators."""
        return self.backend.startswith("inductor")

    @property
    def memory_setting(self) -> dict[str, Any]:
        """The fields that may differ between compilations that share a sharded program."""
        names = ("recompute", "recompute_rest", "memory_budget", "device_memory", "offload")
        return {name: getattr(self, name) for name in (*names, "split_backward")}

    @property
    def chunk_counts(self) -> tuple[tuple[int, ...] | None, ...]:
        """Allowed numbers of chunks for a loss head and for attention; ``None``: by the peak."""
        asked = [getattr(self, name) for name in _CHUNKS]
        return tuple(None if count == "auto" else (count,) for count in asked)

    @property
    def budget_bytes(self) -> int | None:
        """``memory_budget`` as a number."""
        given = self.memory_budget
        return None if given is None else parse_bytes("memory_budget", given)

    @property
    def device_bytes(self) -> int | None:
        """``device_memory`` as a number."""
        given = self.device_memory
        return None if given is None else parse_bytes("device_memory", given)

    def refuse_device_memory(
        self, where: Literal["data", "pipeline", "grid", "suggest", "backend"]
    ) -> None:
        """Raise :class:`ArgumentError` if ``device_memory`` is given where it has no meaning."""
        if self.device_memory is not None:
            raise ArgumentError(f"device_memory={self.device_memory!r}: {_INSTEAD[where]}")


_INSTEAD = {
    "data": "memory for parameters under data parallelism is not counted; give a memory_budget "
    "for the activations, and see sp_compiler.plan(..., mesh=)",
    "pipeline": "a pipeline takes memory=, the limit of each stage",
    "grid": "a grid's plan shows each stage's total; sp_compiler.suggest(memory=) searches",
    "suggest": "suggest takes memory=, what a step may take on each device",
    "backend": "torch.compile keeps the parameters unsharded on every rank, which is not counted; "
    "give a memory_budget for the activations, or use sp_compiler.compile",
}
"""Advice: alternatives to ``device_memory``."""


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise :class:`ArgumentError` if ``value`` is not among ``allowed``."""
    # The type must match too: 1 == True, but overlap=1 is a mistake.
    if value not in allowed or type(value) not in {type(choice) for choice in allowed}:
        raise ArgumentError(f"{name}={value!r}: {expected_one_of(value, allowed, repr)}")
