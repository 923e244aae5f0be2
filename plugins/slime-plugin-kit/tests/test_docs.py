"""The guide lists the properties of every kind. Run as a script, this file writes the list."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts import example
from slime_plugin_kit.kinds import KINDS

PAGE = Path(__file__).parents[3] / "docs" / "contract-kit.md"
BEGIN, END = "<!-- properties -->\n\n", "\n<!-- /properties -->\n"
TITLES = {
    "entries": "Every entry point",
    "kl": "KL estimators",
    "buffer_filters": "Buffer filters",
    "sources": "Data sources",
    "renderers": "Prompt renderers",
    "shaping": "Reward shapers",
    "transports": "Weight transports",
    "middlewares": "Router middlewares",
}
REMARKS = {"transports": "Those that declare `sends_nothing` have none of these."}


def listed() -> str:
    parts = []
    for kind in KINDS:
        title = TITLES.get(kind.name, kind.name.capitalize())
        rows = [f"| `{prop.name}` | {prop.description} |" for prop in kind.properties]
        remark = [REMARKS[kind.name] + "\n"] if kind.name in REMARKS else []
        parts.append("\n".join([f"### {title}\n", *remark, "| property | what it requires |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def test_the_page_lists_the_properties():
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == listed(), f"write it again: python {Path(__file__).name}"


def test_the_page_lists_the_examples():
    names = [name for name, thing in vars(example).items() if getattr(thing, "__module__", "") == example.__name__]
    assert [name for name in names if name != "ExampleSample" and f"| `{name}` |" not in PAGE.read_text()] == []


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + listed() + END + rest.partition(END)[2])
