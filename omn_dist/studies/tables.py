"""Rows of a study as text: a table for people, CSV for programs."""

import csv
import io
from collections.abc import Sequence

from omn_dist.studies.study import Row

HEADER = (
    "ranks",
    "waves",
    "max/mean",
    "bound",
    "gap",
    "by waves",
    "MiB sent",
    "MiB temp",
    "step ms",
    "AdamW ms",
    "exposed ms",
    "strategy",
)

LEGEND = """\
max/mean    FLOPs of the busiest rank over the mean: 1 is perfect
bound       the least max/mean that any assignment of these matrices (and slices, with teams) can have (proven), and gap: how far
            above it the plan is
by waves    the same when every wave waits for its slowest rank
MiB sent    by the rank that sends most, in one step, to other ranks;  MiB temp: slots and stack of the rank that needs most
step ms     predicted time of the whole optimizer step, AdamW included;  AdamW ms: if AdamW took all parameters
exposed ms  of that, the longest that a rank waits for messages or for other ranks"""


def cells(row: Row) -> tuple[str, ...]:
    """The cells under ``HEADER``."""
    plan = row.plan
    mean = max(float(plan.flops_by_rank.mean()), 1.0)
    return (
        f"{plan.world_size}",
        f"{len(plan.waves)}",
        f"{plan.imbalance:.4f}",
        f"{plan.bound.value / mean:.4f}",
        f"{plan.gap:.2%}",
        f"{plan.wave_imbalance:.4f}",
        f"{plan.bytes_sent_by_rank.max() / 2**20:.1f}",
        f"{plan.temporary_bytes / 2**20:.1f}",
        f"{1e3 * row.timeline.seconds:.2f}",
        f"{1e3 * row.timeline.adamw_seconds:.2f}",
        f"{1e3 * row.timeline.exposed_seconds.max():.2f}",
        row.strategy,
    )


def format_table(rows: Sequence[Row]) -> str:
    """One table a model, each under a line that names it, and remarks under it."""
    blocks = []
    for name in dict.fromkeys(row.model.name for row in rows):
        own = [row for row in rows if row.model.name == name]
        model = own[0].model
        lines = [HEADER, *(cells(row) for row in own)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        block = [f"# {name}: {len(model.matrices):,} matrices, {model.num_elements:,} parameters ({model.source})"]
        for line in lines:
            aligned = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
            block.append("  ".join((*aligned, line[-1])))
        block += remarks(own)
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the numbers do not say themselves: where whole matrices are the limit, and whether teams help."""
    lines = []
    for row in rows:
        if row.teams is None:
            continue
        whole = row.teams.whole
        start = f"# {whole.world_size} ranks: whole matrices end at {whole.imbalance:.3f} (bound by {whole.bound.reason})"
        option = "" if row.teams.plan.teams == row.plan.teams else "; the optimizer's teams='auto' (here --teams auto) forms these"
        lines.append(f"{start}; {row.teams}{option}")
    return lines


def to_csv(rows: Sequence[Row]) -> str:
    """All scalar fields of the rows' JSON form, with a header line."""
    flat = [{key: value for key, value in row.as_json().items() if not isinstance(value, dict)} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
