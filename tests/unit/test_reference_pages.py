"""docs/reference is generated from the code, and docs/reference/metrics.md names every metric."""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / "tests" / "docs" / "generate_reference.py"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
RECORDED = sorted((ROOT / "tests" / "data").rglob("metrics.jsonl"))
SOURCES = (ROOT / "slime_core", *sorted((ROOT / "plugins").glob("*/src")))
METRIC = re.compile(r"(rollout|perf|eval|train)/[\w/*@.-]+")
# The axes, and a scope in an example.
NO_METRICS = {"train/step", "rollout/step", "eval/step", "train/1"}


def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_fresh():
    module = generator()
    stale = [path.name for path, text in module.pages().items() if not path.is_file() or path.read_text() != text]
    assert not stale, f"docs/reference: {', '.join(stale)} out of date. Run: {module.COMMAND}"


@cache
def documented():
    """Names in the first column of the tables; several in one row are separated by commas."""
    rows = [line.split("|")[1] for line in METRICS.read_text().splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@cache
def pattern(name):
    """A regular expression: words in capitals match any text, DIST one of four suffixes."""
    ends = re.escape(name).replace("DIST", "(mean|median|max|min)")
    return re.compile(re.sub(r"[A-Z][A-Z_]*", ".+", ends))


@cache
def metric_literals():
    """Every metric name that the code writes with its prefix; `*` where a value goes."""
    found = {}
    for path in (path for folder in SOURCES for path in folder.rglob("*.py")):
        if "slime_plugin_kit" in path.parts:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        texts = [
            "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
            for node in nodes
            if isinstance(node, ast.JoinedStr)
        ]
        texts += [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[-1:] not in ("*", "/", "_")
        ]
        found |= {text: path for text in texts if METRIC.fullmatch(text) and text not in NO_METRICS}
    return found


def is_documented(name):
    """`*` in the name of a metric matches any text."""
    expected = re.compile(re.escape(name).replace(r"\*", ".+"))
    return any(pattern(known).fullmatch(name) or expected.fullmatch(known) for known in documented())


def test_every_metric_of_the_code_is_in_the_table():
    """`distribution` writes a name with each of four ends."""
    found = metric_literals()
    missing = {name: path for name, path in found.items() if not (is_documented(name) or is_documented(f"{name}/mean"))}
    assert len(found) > 80
    assert not missing, f"docs/reference/metrics.md lacks {missing}"


def test_every_metric_of_recorded_runs_is_in_the_table():
    lines = [line for path in RECORDED for line in path.read_text().splitlines()]
    names = {name for line in lines for name in json.loads(line)["metrics"]}
    assert len(names) > 80
    assert not [name for name in sorted(names) if not is_documented(name)]


def test_every_metric_of_the_table_is_in_the_code():
    text = "\n".join(path.read_text() for folder in SOURCES for path in folder.rglob("*.py"))
    for name in documented():
        # What the code joins: prefix, role, name, end. The rest is a word of a source file.
        joined = re.sub(r"^(train/(critic-)?|rollout/|perf/|eval/)|/DIST$", "", name)
        for part in re.split(r"[/@-]|[A-Z][A-Z_]*", joined):
            word = re.sub(r"^mis_|^num_|_time$|^_|_$", "", part)
            assert word in text, name
