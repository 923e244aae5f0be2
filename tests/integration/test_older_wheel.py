"""A wheel that was built for 0.1 requires slime-core, which is another project's name now: it is refused with a sentence that
names the distribution to upgrade, and the same code works once it requires slime-rl."""

import json

import pytest

SENTENCE = (
    "older-slime 0.1.0 was built for slime 0.1: older-slime requires slime-core, and the kernel is slime-rl now (slime-core on "
    "PyPI is another project). Upgrade older-slime to a version that requires slime-rl, or ask its author for one"
)
ENTRIES = {"older_digits", "older_keep", "older_count", "older_fsdp", "older_watch"}
USES = {
    "reward": ("--reward", "older_digits"),
    "filter": ("--set", "rollout.filters=['older_keep']"),
    "middleware": ("--set", "router.middlewares=['older_count']"),
    "backend": ("--backend", "older_fsdp"),
}
NAMES = {"reward": "older_digits", "filter": "older_keep", "middleware": "older_count", "backend": "older_fsdp"}
EVERYTHING = tuple(word for words in USES.values() for word in words)


@pytest.fixture(scope="module")
def older(install_third_party):
    return install_third_party("older-slime")


@pytest.fixture(scope="module")
def upgraded(install_third_party):
    return install_third_party("older-slime", requires="slime-rl>=0.2,<0.3")


def run(installed, tiny, *words):
    return installed.slime("run", str(tiny / "run.toml"), "--runs-dir", str(tiny.runs), *words)


@pytest.mark.parametrize("kind", USES)
def test_a_run_that_names_one_of_its_parts_is_refused(older, tiny, kind):
    done = run(older, tiny, "--dry-run", *USES[kind])
    assert done.returncode == 2
    assert f"{NAMES[kind]} of {SENTENCE}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_is_refused_while_its_observer_is_installed(older, tiny):
    """Every observer is loaded. Not by --dry-run, which starts nothing that could be observed."""
    done = run(older, tiny, "--num-rollout", "1")
    assert done.returncode == 2
    assert f"older_watch of {SENTENCE}, or switch it off with SLIME_PLUGINS_DENY=older-slime." in done.stderr
    assert not (tiny.runs / "tiny" / "metrics.jsonl").exists()


def test_the_listing_and_the_check_report_it(older):
    listed = json.loads(older.slime("plugins", "--json").stdout)
    assert {r["name"]: r["status"] for r in listed if r["dist"] == "older-slime"} == dict.fromkeys(
        ENTRIES, "requires slime-core"
    )
    allowed = {"SLIME_PLUGINS_ALLOW": "older-slime,slime-plugin-kit"}
    done = older.slime("plugins", "--check", "--json", **allowed)
    assert done.returncode == 1
    problems = {r["name"]: r["problems"] for r in json.loads(done.stdout) if r["dist"] == "older-slime"}
    assert problems == {name: [f"{name} of {SENTENCE}"] for name in ENTRIES}
    assert SENTENCE in older.slime("plugins", "--check", **allowed).stdout


def test_the_doctor_reports_it(older):
    found = json.loads(older.slime("doctor", "--json").stdout)
    assert [(one["state"], one["told"], one["advice"]) for one in found if one["what"] == "slime-core"] == [
        (
            "bad",
            "older-slime 0.1.0 requires slime-core, as if for slime 0.1; on PyPI that is another project",
            "pip install --upgrade older-slime, to a version that requires slime-rl",
        )
    ]
    assert not [one for one in found if "pip install 'slime-core" in one["advice"]]


def test_the_same_code_works_once_it_requires_slime_rl(upgraded, tiny):
    done = run(upgraded, tiny, "--num-rollout", "1", *EVERYTHING)
    assert done.returncode == 0, done.stderr
    plugins = json.loads((tiny.runs / "tiny" / "manifest.json").read_text())["plugins"]
    assert any("older-slime" in str(plugin) for plugin in plugins.items())
    assert (tiny.runs / "tiny" / "older.log").read_text() == "tiny"
    assert any("router/older_count/requests" in str(record) or "requests" in str(record) for record in tiny.metrics())
    checked = upgraded.slime("plugins", "--check", "--json", SLIME_PLUGINS_ALLOW="older-slime,slime-plugin-kit")
    problems = {r["name"]: r["problems"] for r in json.loads(checked.stdout) if r["dist"] == "older-slime"}
    assert problems == {name: [] for name in ENTRIES}
