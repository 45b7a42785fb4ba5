"""Rows of a study as text: tables and CSV."""

import csv
import io
from collections.abc import Sequence

from omn_dist.roles.summary import align_columns
from omn_dist.studies.study import StudyRow

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
max/mean    FLOPs of the busiest rank over the mean (1 is perfect)
bound       proven lower bound of max/mean for these matrices (and slices, with teams)
gap         how far the plan is above the bound
by waves    max/mean if every wave waits for its slowest rank
MiB sent    to other ranks in one step, by the rank that sends most
MiB temp    slots and stack of the rank that needs most
step ms     predicted time of the whole optimizer step, AdamW included
AdamW ms    predicted time of the step if AdamW updated all parameters
exposed ms  part of step ms in which a rank waits for messages or other ranks, at most"""


def cells(row: StudyRow) -> tuple[str, ...]:
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


def format_study(rows: Sequence[StudyRow]) -> str:
    """One table a model, with a line that names it above and remarks below."""
    tables = []
    for name in dict.fromkeys(row.model.name for row in rows):
        own = [row for row in rows if row.model.name == name]
        model = own[0].model
        lines = [HEADER, *(cells(row) for row in own)]
        head = f"# {name}: {len(model.matrices):,} matrices, {model.num_elements:,} parameters ({model.source})"
        table = align_columns(lines, right=range(len(HEADER) - 1))
        tables.append("\n".join([head, table, *remarks(own)]))
    return "\n\n".join(tables)


def remarks(rows: Sequence[StudyRow]) -> list[str]:
    """A line for each row in which whole matrices limit the balance: how far, and what teams do."""
    lines = []
    for row in rows:
        if row.teams is None:
            continue
        whole = row.teams.whole
        start = f"# {whole.world_size} ranks: max/mean of whole matrices is {whole.imbalance:.3f} (bound by {whole.bound.reason})"
        option = "" if row.teams.plan.teams == row.plan.teams else "; the optimizer's teams='auto' (here --teams auto) forms them"
        lines.append(f"{start}; {row.teams}{option}")
    return lines


def to_csv(rows: Sequence[StudyRow]) -> str:
    """All scalar fields of the rows' JSON form as CSV, with a header line."""
    flat = [{key: value for key, value in row.as_json().items() if not isinstance(value, dict)} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
