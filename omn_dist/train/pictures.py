"""Pictures of a run, drawn with matplotlib where it is installed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def draw_loss_curve(rows: Iterable[Mapping[str, Any]], path: Path) -> bool:
    """Draw training and validation loss against accepted tokens into a PNG.

    Args:
        rows: of a metrics file.
        path: the PNG to write.

    Returns:
        False where matplotlib is not installed; nothing is written then.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = list(rows)
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for kind, style in (("train", {"linewidth": 0.8, "alpha": 0.7}), ("validation", {"marker": "o", "markersize": 3})):
        of_kind = [row for row in rows if row["kind"] == kind and row["loss"] is not None]
        points = [(row["tokens"], row["loss"]) for row in of_kind]
        if points:
            axes.plot(*zip(*points, strict=True), label=kind, **style)
    axes.set_xlabel("accepted tokens")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
    return True
