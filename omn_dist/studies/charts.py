"""Pictures of a study; they need matplotlib (the extra ``plots``)."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omn_dist.settings import SettingsError
from omn_dist.studies.study import StudyRow, loads

_COLORS = {
    "prepare": "#9ecae1",
    "adamw": "#74c476",
    "unpack": "#c6dbef",
    "orthogonalize": "#3182bd",
    "pack": "#9e9ac8",
    "apply": "#6baed6",
    "wait": "#e6550d",
}
# More ranks than this cannot be told apart in a time line.
_MOST_LANES = 16
# More waves than this cannot be told apart in a time line.
_MOST_WAVES = 40


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SettingsError("pictures need matplotlib: install omn-dist[plots], or leave out --plot and --html") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def charts(rows: Sequence[StudyRow]) -> dict[str, bytes]:
    """PNG pictures by name.

    *imbalance*, *memory* and *step* are drawn against ranks, for all models. Each model has *load*
    of the plan with most ranks, *timeline* of the plan with fewest, and *shares* of its activities.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    pictures = {
        "imbalance": _drawn(lambda axes: _against_ranks(axes, rows, lambda row: row.plan.imbalance, "busiest / mean FLOPs", True)),
        "memory": _drawn(
            lambda axes: _against_ranks(axes, rows, lambda row: row.plan.temporary_bytes / 2**20, "temporary MiB a rank", False)
        ),
        "step": _drawn(
            lambda axes: _against_ranks(axes, rows, lambda row: 1e3 * row.timeline.seconds, "predicted optimizer step, ms", False)
        ),
    }
    for name in dict.fromkeys(row.model.name for row in rows):
        # Plans of the default strategy, if there are any.
        own = [row for row in rows if row.model.name == name and row.strategy == "flops"] or [
            row for row in rows if row.model.name == name
        ]
        few, many = min(own, key=lambda row: row.plan.world_size), max(own, key=lambda row: row.plan.world_size)
        pictures[f"load-{name}"] = _drawn(partial(_load, row=many))
        pictures[f"timeline-{name}"] = _drawn(partial(_timeline, row=few))
        pictures[f"shares-{name}"] = _drawn(partial(_shares, rows=own))
    return pictures


def _drawn(draw: Callable[[Any], None]) -> bytes:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), layout="constrained")
    draw(axes)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=80)
    pyplot.close(figure)
    return stream.getvalue()


def _against_ranks(axes: Any, rows: Sequence[StudyRow], value: Callable[[StudyRow], float], label: str, bounded: bool) -> None:
    for model, strategy in dict.fromkeys((row.model.name, row.strategy) for row in rows):
        own = [row for row in rows if (row.model.name, row.strategy) == (model, strategy)]
        ranks = [row.plan.world_size for row in own]
        axes.plot(ranks, [value(row) for row in own], marker="o", markersize=3, label=f"{model} {strategy}")
    if bounded:
        for model in dict.fromkeys(row.model.name for row in rows):
            least = {
                row.plan.world_size: row.plan.bound.value / max(float(row.plan.flops_by_rank.mean()), 1.0)
                for row in rows
                if row.model.name == model
            }
            axes.plot(list(least), list(least.values()), color="black", linewidth=0.8, linestyle="--")
        axes.plot([], [], color="black", linewidth=0.8, linestyle="--", label="lower bound (proven)")
    axes.set_xscale("log", base=2)
    if max(value(row) for row in rows) > 4 * min(value(row) for row in rows):
        axes.set_yscale("log")
    ticks = sorted({row.plan.world_size for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, ncols=2)


def _load(axes: Any, row: StudyRow) -> None:
    share = loads(row)
    axes.bar(range(len(share)), share, width=1.0, color=_COLORS["orthogonalize"])
    axes.axhline(1.0, color="black", linewidth=0.8, label="mean")
    least = row.plan.bound.value / max(float(row.plan.flops_by_rank.mean()), 1.0)
    axes.axhline(
        least, color="#e6550d", linewidth=1, linestyle="--", label=f"lower bound of the busiest rank (proven): {least:.3f}"
    )
    axes.set_xlabel("rank")
    axes.set_ylabel("FLOPs / mean")
    axes.set_title(f"{row.model.name} on {row.plan.world_size} ranks, {row.strategy}: busiest {row.plan.imbalance:.3f}", fontsize=9)
    axes.legend(fontsize=7)


def _timeline(axes: Any, row: StudyRow) -> None:
    lanes = min(row.plan.world_size, _MOST_LANES)
    for event in row.timeline.events:
        if event.wave >= _MOST_WAVES:
            continue
        if event.activity in ("gather", "scatter"):
            axes.barh(-1, 1e3 * (event.end[0] - event.start[0]), left=1e3 * event.start[0], height=0.8, color="#756bb1")
            continue
        widths = 1e3 * (event.end - event.start)[:lanes]
        axes.barh(range(lanes), widths, left=1e3 * event.start[:lanes], height=0.8, color=_COLORS[event.activity])
    for activity, color in (*_COLORS.items(), ("network", "#756bb1")):
        axes.barh(0, 0, color=color, label=activity)
    axes.set_yticks([-1, *range(lanes)], ["network", *map(str, range(lanes))], fontsize=7)
    axes.invert_yaxis()
    axes.set_ylabel("rank")
    axes.set_xlabel("ms")
    shown = "" if len(row.plan.waves) <= _MOST_WAVES else f"; first {_MOST_WAVES} of {len(row.plan.waves)} waves"
    title = f"{row.model.name} on {row.plan.world_size} ranks: {1e3 * row.timeline.seconds:.1f} ms predicted{shown}"
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=6, ncols=4, loc="lower right")


def _shares(axes: Any, rows: Sequence[StudyRow]) -> None:
    ranks = [str(row.plan.world_size) for row in rows]
    bottom = [0.0] * len(rows)
    for activity, color in _COLORS.items():
        parts = [100 * row.timeline.share(activity) for row in rows]  # type: ignore[arg-type]
        axes.bar(ranks, parts, bottom=bottom, color=color, label=activity)
        bottom = [below + part for below, part in zip(bottom, parts, strict=True)]
    axes.set_xlabel("ranks")
    axes.set_ylabel("predicted share of the step, %")
    axes.set_title(f"{rows[0].model.name}: what a rank does in a step (mean over ranks)", fontsize=9)
    axes.legend(fontsize=6, ncols=3)
