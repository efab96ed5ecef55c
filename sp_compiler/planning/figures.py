"""Figures of a plan: memory over a step, the timeline of a layer, which rank has which part of a
weight."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import Placement
from sp_compiler.base.units import UNITS, bytes_text, parse_bytes, time_text
from sp_compiler.cost.node_cost import Span
from sp_compiler.cost.step_timeline import category_of, duration_us
from sp_compiler.planning.data import BlockPlan, ParameterSize, PlanData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD = "#3b76af", "#c8652d"
_STATE = ("#5d6d7e", "#95a5a6", "#d0d6da")  # parameters, gradients, optimizer
_CATEGORIES = {"compute": FORWARD, "recompute": "#e0a13c", "communication": "#4f9d69"}
_LIMIT = "#b03030"
BESIDE: Any = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
"""Place of a legend, next to the axes, so that it covers nothing."""
_WIDTH_INCHES = 10.0
_ROW_INCHES = 0.3  # of one parameter, labelled with its name
_DPI = 150


def new_figure(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, one below the other, of these heights in inches.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    # Imported here: only figures use it, and it is not installed with the package.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "figures need matplotlib, which is not installed: pip install matplotlib, or "
            "use to_html(), which does not need it"
        ) from error

    class ShownFigure(Figure):
        """A figure that notebooks show, even if they never import pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    # Not pyplot, which would open windows and keep every figure alive.
    figure = ShownFigure(
        figsize=(_WIDTH_INCHES, sum(heights) + 0.7 * len(heights)), layout="constrained"
    )
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)
    return figure, [each for row in axes for each in row]


def save(figure: Figure, path: str | Path | None) -> None:
    """Write ``figure`` in the format that the suffix of ``path`` names; nothing without a path."""
    if path is not None:
        figure.savefig(path, dpi=_DPI)


def draw(plan: PlanData) -> Figure:
    """Draw the figure of :meth:`sp_compiler.Plan.plot`."""
    if not plan.blocks:  # a model without operators
        figure, (memory,) = new_figure([2.6])
        _draw_memory(memory, plan)
        return figure
    # The block of most layers; prologue and epilogue are called once.
    block = max(plan.blocks, key=lambda each: each.num_calls)
    call = next(call for call in plan.calls if call.block == block.name)
    # The plan has a tied parameter only under the name that it is stored under.
    names = [name for name in call.parameters if name in plan.parameters and plan.tp > 1]
    heights = [2.6, 1.6 if plan.tp > 1 else 1.2]
    if names:
        heights.append(_ROW_INCHES * len(names) + 0.3)
    figure, axes = new_figure(heights)
    ranks = f"{plan.tp} tensor-parallel rank{'s' if plan.tp > 1 else ''}"
    figure.suptitle(f"{plan.model_name} on {ranks}, recompute={plan.options['recompute']}")
    _draw_memory(axes[0], plan)
    _draw_course(axes[1], plan, block)
    if names:
        weights = {name.removeprefix(f"{call.path}."): plan.parameters[name] for name in names}
        _draw_weights(axes[2], weights, plan.tp)
        axes[2].set_title(f"Weights of {block.name}, by rank", loc="left")
    return figure


def _draw_memory(axes: Axes, plan: PlanData) -> None:
    """Parameters, gradients and optimizer below the activations, and the limit."""
    state = {
        "parameters": plan.parameter_bytes,
        "gradients": plan.gradient_bytes,
        "optimizer": plan.optimizer_bytes,
    }
    unit, scale = size_unit(plan.total_bytes)
    count = max(1, len(plan.timeline))
    base = 0.0
    for (name, num_bytes), color in zip(state.items(), _STATE, strict=True):
        label = f"{name} {bytes_text(num_bytes)}"
        axes.fill_between(
            [0, count], base, base + num_bytes / scale, color=color, label=label, lw=0
        )
        base += num_bytes / scale
    for phase, color in (("forward", FORWARD), ("backward", BACKWARD)):
        heights = [
            moment.num_bytes / scale if moment.phase == phase else 0.0 for moment in plan.timeline
        ]
        label = f"activations, {phase}"
        axes.bar(
            [index + 0.5 for index in range(len(heights))],
            heights, width=1.0, bottom=base, color=color, label=label, lw=0,
        )  # fmt: skip
    top = plan.total_bytes / scale
    axes.axhline(top, color="black", lw=0.8, ls=":")
    axes.annotate(
        f"peak {bytes_text(plan.total_bytes)}", (0, top), (3, 3), textcoords="offset points"
    )
    limit = _limit_bytes(plan)
    if limit is not None:
        draw_limit(axes, limit, scale)
        top = max(top, limit / scale)
    axes.set(xlim=(0, count), ylim=(0, 1.16 * top or 1.0), ylabel=unit, xticks=[])
    axes.set_xlabel("calls of blocks, forward and backward")
    axes.set_title("Memory of a rank in a step", loc="left")
    axes.legend(**BESIDE)


def draw_limit(axes: Axes, num_bytes: float, scale: float) -> None:
    """A line at a limit of memory."""
    axes.axhline(num_bytes / scale, color=_LIMIT, lw=1.2, ls="--")
    axes.annotate(
        f"limit {bytes_text(num_bytes)}", (1, num_bytes / scale), (-3, 3), color=_LIMIT, ha="right",
        xycoords=axes.get_yaxis_transform(), textcoords="offset points",
    )  # fmt: skip


def _limit_bytes(plan: PlanData) -> float | None:
    """Total memory that the options allow a rank."""
    device, budget = plan.options["device_memory"], plan.options["memory_budget"]
    if device is not None:
        return parse_bytes("device_memory", device)
    if budget is None:
        return None
    # A budget covers only activations; the figure has the state below them.
    state = plan.total_bytes - plan.activation_peak_bytes
    return state + parse_bytes("memory_budget", budget)


def _draw_course(axes: Axes, plan: PlanData, block: BlockPlan) -> None:
    """Timeline of one layer on the device and its link, forward and then backward."""
    # One rank has no link.
    rows = {"tp": "link", "compute": "device"} if plan.tp > 1 else {"compute": "device"}
    begin_us = 0.0
    for phase in ("forward", "backward"):
        functions = plan.schedule.functions
        spans = functions.get((block.name, phase), ())
        if phase == "backward":  # the one that most layers run
            for name in ("backward_ahead", "backward_behind"):
                spans = functions.get((block.name, name), spans)
        for row, stream in enumerate(rows):
            _draw_spans(axes, [s for s in spans if s.stream == stream], begin_us, row)
        took_us = duration_us(spans)
        title = f"{phase} {time_text(took_us)}"
        axes.annotate(title, (begin_us, len(rows) - 0.5), (3, 2), textcoords="offset points")
        axes.axvline(begin_us, color="black", lw=0.6)
        begin_us += took_us
    names = list(_CATEGORIES)[: len(rows) + 1]
    for name in names:
        axes.bar(0, 0, color=_CATEGORIES[name], label=name)
    axes.set(xlim=(0, begin_us or 1.0), ylim=(-0.5, len(rows) - 0.1))
    axes.set_yticks(range(len(rows)), list(rows.values()))
    axes.set_xlabel(f"us on {plan.hardware.name}, estimated")
    step = f"in a step of {time_text(plan.step_us)}"
    axes.set_title(f"One of {block.num_calls} {block.name}, {step}", loc="left")
    axes.legend(**BESIDE)


def _draw_spans(axes: Axes, spans: Iterable[Span], begin_us: float, row: int) -> None:
    for span in spans:
        color = _CATEGORIES[category_of(span)]
        # With an edge, or adjacent kernels would look like one.
        axes.broken_barh(
            [(begin_us + span.begin_us, span.duration_us)], (row - 0.4, 0.8),
            facecolor=color, edgecolor="white", linewidth=0.3,
        )  # fmt: skip


def _draw_weights(axes: Axes, parameters: Mapping[str, ParameterSize], tp: int) -> None:
    """Each weight as a box, cut along its sharded dim into parts in the colors of their ranks."""
    from matplotlib import colormaps

    colors = colormaps["viridis"].resampled(tp)
    elements = {name: _full_numel(each, tp) for name, each in parameters.items()}
    most = max(elements.values(), default=1)
    for row, (name, each) in enumerate(parameters.items()):
        # Scaled by the square root, or vectors would be invisible next to matrices.
        width = max(0.02, (elements[name] / most) ** 0.5)
        placement = Placement.parse(each.placement)
        if not placement.is_sharded:
            axes.barh(
                row, width, height=0.7,
                facecolor="#eeeeee", edgecolor="#555555", hatch="///", linewidth=0.6,
            )  # fmt: skip
        for rank, segment, count in _parts(placement, tp):
            begin, size = (segment * tp + rank) / (count * tp), 1 / (count * tp)
            # Rows from top to bottom, columns from left to right, as a matrix is written.
            across, down = ((0.0, 1.0), (begin, size))
            if placement.dim > 0:
                across, down = down, across
            axes.broken_barh(
                [(across[0] * width, across[1] * width)],
                (row + 0.7 * (down[0] - 0.5), 0.7 * down[1]),
                facecolor=colors(rank), edgecolor="white", linewidth=0.3,
            )  # fmt: skip
        shape = " x ".join(map(str, each.shape))
        same = " on each rank" if placement.is_sharded else ", the same on every rank"
        axes.annotate(
            f"{shape}{same}", (width, row), (5, 0), textcoords="offset points", va="center"
        )
    axes.set(xlim=(0, 1.6), ylim=(len(parameters) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(parameters)), list(parameters))
    axes.spines[:].set_visible(False)
    for rank in range(tp):
        axes.bar(0, 0, color=colors(rank), label=f"rank {rank}")
    axes.legend(**BESIDE)


def _full_numel(size: ParameterSize, tp: int) -> int:
    return size.numel * (tp if Placement.parse(size.placement).is_sharded else 1)


def _parts(placement: Placement, tp: int) -> Iterable[tuple[int, int, int]]:
    """Rank, number of the segment and of all segments, for each part of a sharded weight."""
    if placement.is_sharded:
        count = max(1, len(placement.segments))
        yield from ((rank, segment, count) for segment in range(count) for rank in range(tp))


def size_unit(num_bytes: float) -> tuple[str, int]:
    """The unit in which a size is read best, and its bytes."""
    unit = bytes_text(num_bytes).split()[1]
    return unit, 1024 ** UNITS.index(unit)
