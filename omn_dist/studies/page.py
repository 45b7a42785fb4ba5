"""An HTML report in one file that loads nothing else: tables, remarks and pictures."""

import base64
import html
from collections.abc import Mapping, Sequence

from omn_dist.studies.study import StudyRow
from omn_dist.studies.tables import HEADER, LEGEND, cells, remarks

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd }
img { max-width: 100%; margin: .5em 0 } pre { background: #f6f6f6; padding: .8em; overflow-x: auto }
"""


def html_page(rows: Sequence[StudyRow], pictures: Mapping[str, bytes], facts: Sequence[str]) -> str:
    """The report; ``facts`` are lines that hold for all rows, such as device and topology."""
    parts = ["<!doctype html><html lang='en'><meta charset='utf-8'><title>Plans</title>", f"<style>{_STYLE}</style>"]
    parts.append("<h1>Owners, balance and predicted steps</h1>")
    parts.append(f"<pre>{html.escape(chr(10).join(facts))}</pre><pre>{html.escape(LEGEND)}</pre>")
    for name in dict.fromkeys(row.model.name for row in rows):
        own = [row for row in rows if row.model.name == name]
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(own[0].model.source)}</p><table>")
        parts.append("<tr>" + "".join(f"<th>{cell}</th>" for cell in HEADER) + "</tr>")
        for row in own:
            parts.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>")
        parts.append("</table>")
        parts += [f"<p>{html.escape(line.lstrip('# '))}</p>" for line in remarks(own)]
    for name, picture in pictures.items():
        encoded = base64.b64encode(picture).decode()
        parts.append(f"<h3>{html.escape(name)}</h3><img alt='{html.escape(name)}' src='data:image/png;base64,{encoded}'>")
    return "\n".join(parts) + "\n</html>\n"
