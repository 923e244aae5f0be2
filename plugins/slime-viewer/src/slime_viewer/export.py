"""The page with its data in one HTML file, for readers without slime."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from slime_core.atomic_io.atomic_file import write_atomically
from slime_core.errors import DataError
from slime_viewer.app import STATIC
from slime_viewer.json_reply import json_bytes
from slime_viewer.open_run import OpenRun
from slime_viewer.replies import OF_RUN, Page, Parameters, sample_set
from slime_viewer.sample_table import Asked
from slime_viewer.view_folder import TRAIN

POINTS: Final = 400
"""Of a curve."""
STEPS: Final = 4
"""Of each set: the first and the last ones."""
WORST: Final = 48
BEST: Final = 16
"""Samples of a step that are there whole."""
MOST_GROUPS: Final = 1000

SCRIPT: Final = re.compile(r'<script type="module"[^>]*\ssrc="\./(?P<file>[^"]+)"[^>]*></script>')
STYLE: Final = re.compile(r'<link rel="stylesheet"[^>]*\shref="\./(?P<file>[^"]+)"[^>]*>')
ICON: Final = re.compile(r"\s*<link rel=\"icon\"[^>]*>")


def write_export(page: Page, path: Path) -> None:
    """Raises StorageError if it cannot be written."""
    exported = Page(page.runs, page.panels, exported=True)
    replies = dict(replies_of(exported))
    modules = {name: panel.panel.module for name, panel in exported.panels.items()}
    text = self_contained(json_bytes({"replies": replies, "modules": modules}))
    write_atomically(path, lambda aside: aside.write_bytes(text))


def self_contained(data: bytes) -> bytes:
    """The bundle in one document. Its policy allows the bundle's own script and style, and modules of panels."""
    document = (STATIC / "index.html").read_text()
    script_tag, style_tag = SCRIPT.search(document), STYLE.search(document)
    assert script_tag is not None
    assert style_tag is not None
    # The characters that would end the element; in JavaScript they only occur in texts and patterns, where \/ is /.
    script = (STATIC / script_tag["file"]).read_text().replace("</script", "<\\/script")
    style = (STATIC / style_tag["file"]).read_text()
    policy = (
        f"default-src 'none'; script-src {hash_source(script)} blob:; style-src {hash_source(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    document = ICON.sub("", document)
    document = document.replace(style_tag[0], f"<style>{style}</style>").replace(script_tag[0], "")
    document = document.replace(
        "<head>", f'<head>\n    <meta http-equiv="Content-Security-Policy" content="{policy}" />', 1
    )
    # In JSON, < only occurs in texts. The data are put in last: nothing in them may be taken for a place of the document.
    before, end, after = document.partition("</body>")
    embedded = b'<script type="application/json" id="slime-export">' + data.replace(b"<", b"\\u003c") + b"</script>\n"
    run = f'<script type="module">{script}</script>\n  '.encode()
    return before.encode() + embedded + run + (end + after).encode()


def hash_source(text: str) -> str:
    """What a policy calls an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def key_of(path: str, parameters: Mapping[str, Any]) -> str:
    """As `keyOf` of the page writes it: sorted, without empty ones."""
    written = "&".join(f"{name}={quote(str(value), safe=UNQUOTED)}" for name, value in sorted(parameters.items()))
    return f"{path}?{written}" if written else path


UNQUOTED: Final = "-_.!~*'()"
"""What encodeURIComponent leaves, beside letters and digits."""


def replies_of(page: Page) -> Iterator[tuple[str, Any]]:
    """Key and reply of everything that the file has."""
    none = Parameters({})
    ids = ",".join(run.id for run in page.runs)
    yield "/api/runs", page.list_runs(none)
    for name, reply in (("compare", page.compare), ("config-difference", page.config_difference)):
        yield f"/api/{name}", reply(none)
        yield key_of(f"/api/{name}", {"runs": ids}), reply(none)
    for run in page.runs:
        base = f"/api/runs/{quote(run.id, safe=UNQUOTED)}"
        for name in ("config", "metrics", "timeline", "health"):
            yield f"{base}/{name}", OF_RUN[name](run, none)
        yield f"{base}/events", OF_RUN["events"](run, Parameters({"limit": "1000"}))
        names = ",".join(metric["name"] for metric in OF_RUN["metrics"](run, none)["metrics"])
        yield f"{base}/series", OF_RUN["series"](run, Parameters({"names": names, "points": str(POINTS)}))
        for name in page.panels:
            yield f"{base}/panels/{quote(name, safe=UNQUOTED)}", page.panel(run, name)
        for name in run.sets():
            yield from replies_of_set(run, base, name)
        if TRAIN not in run.sets():
            yield f"{base}/steps", OF_RUN["steps"](run, none)


def replies_of_set(run: OpenRun, base: str, name: str) -> Iterator[tuple[str, Any]]:
    """Steps, groups and samples of one set."""
    own = {} if name == TRAIN else {"set": name}
    found = sample_set(run, Parameters(own))
    chosen = readable_steps(run, name)
    summary = OF_RUN["steps"](run, Parameters(own))
    rows = [row for row, step in enumerate(summary["step"]) if step in chosen]
    summary |= {key: [summary[key][row] for row in rows] for key in ("step", "samples", "groups", "reward")}
    yield key_of(f"{base}/steps", own), summary
    listed = []
    for step in chosen:
        found.need(step)
        groups = OF_RUN["groups"](run, Parameters({**own, "step": str(step), "limit": str(MOST_GROUPS)}))
        yield key_of(f"{base}/groups", {**own, "step": step}), groups
        if step == chosen[-1]:
            yield key_of(f"{base}/groups", own), groups
            yield key_of(f"{base}/groups", {**own, "step": "last"}), groups
        worst = found.table.samples(Asked(step=step, sort="reward", limit=WORST)).rows
        best = found.table.samples(Asked(step=step, sort="reward", descending=True, limit=BEST)).rows
        keys = [key for rows in (worst, best) for key in zip(rows["index"], rows["part"], strict=True)]
        listed += [(step, index, part) for index, part in dict.fromkeys(keys)]
    samples: dict[str, Any] = {}
    for step, index, part in listed:
        asked = {**own, "step": step, "index": index, **({"part": part} if part else {})}
        yield (
            key_of(f"{base}/sample", asked),
            OF_RUN["sample"](run, Parameters({key: str(value) for key, value in asked.items()})),
        )
        row = OF_RUN["samples"](
            run, Parameters({**own, "step": str(step), "where": f"index={index} part={part}", "limit": "1"})
        )
        samples = joined(samples, row)
    if samples:
        samples |= {"step": None, "total": len(listed), "indexed": len(listed), "rows": len(listed)}
        yield key_of(f"{base}/samples", {**own, "limit": 100_000}), samples


def readable_steps(run: OpenRun, name: str) -> list[int]:
    """The first step and the last ones, of those that can be read."""
    found = sample_set(run, Parameters({"set": name}))
    there = []
    steps = list(found.files)
    for step in [*steps[:1], *steps[1:][-(STEPS - 1) :]]:
        try:
            found.need(step)
        except DataError:
            continue
        there.append(step)
    return there


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Columns of two replies one after the other; other values are of the first."""
    if not one:
        return other
    merged = dict(one)
    for name, value in other.items():
        if isinstance(value, list):
            merged[name] = [*one[name], *value]
        elif name in ("parts", "counts"):
            rows = len(one["at"])
            names = dict.fromkeys([*one[name], *value])
            merged[name] = {key: [*one[name].get(key, [None] * rows), *value.get(key, [None])] for key in names}
    return merged
