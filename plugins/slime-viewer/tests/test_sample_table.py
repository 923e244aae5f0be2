"""What searches, filters and orders choose, compared with Python over the groups that were written."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from written_runs import make_groups

import slime_viewer.sample_table
from slime_core.data.table import dump_file, write_groups
from slime_core.errors import ConfigError
from slime_core.types.batch import TokenColumns
from slime_viewer.sample_set import SampleSet
from slime_viewer.sample_table import Asked
from slime_viewer.search_words import SearchWords
from slime_viewer.token_file import write_tokens

WORDS = ["alpha", "Beta", "gamma", "ÉTÉ", "日本語", "a+b", "x", "(.*)", "two words", "\\boxed{1}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    random = np.random.default_rng(0)
    for step in range(3):
        texts = [[" ".join(random.choice(WORDS, 3)) for _ in range(5)] for _ in range(6)]
        write_groups(dump_file(tmp_path / "rollouts", step), make_groups(step, texts))
    return tmp_path


def indexed(folder: Path) -> SampleSet:
    found = SampleSet(folder, "train")
    found.refresh()
    for step in found.files:
        found.need(step)
    return found


def written(folder: Path) -> list:
    from slime_core.data.table import read_groups

    return [
        sample
        for step in range(3)
        for group in read_groups(dump_file(folder / "rollouts", step))
        for sample in group.samples
    ]


@pytest.mark.parametrize("text", ["alpha", "BETA", "été", "日本語", "a+b", "x", "(.*)", '"two words"', "\\boxed{1}", "gamma x",
                                  "question 21", "alpha nowhere"])  # fmt: skip
@pytest.mark.parametrize("read_all", [10**6, 0])
def test_a_search_finds_what_python_finds(
    folder: Path, text: str, read_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the way of frequent words, which reads the first candidates only."""
    monkeypatch.setattr(slime_viewer.sample_table, "READ_ALL", read_all)
    words = SearchWords.read(text)
    expected = [
        sample.index
        for sample in written(folder)
        if all(w in sample.response.lower() or w in sample.prompt.text.lower() for w in words.words)
    ]
    chosen = indexed(folder).table.samples(Asked(sort="index", words=words, limit=1000))
    assert (chosen.total, chosen.exact, chosen.rows["index"]) == (len(expected), True, expected)
    assert [response for _, response in chosen.texts] == [
        s.response for s in written(folder) if s.index in set(expected)
    ]


def test_pages_in_an_order(folder: Path) -> None:
    table = indexed(folder).table
    samples = written(folder)
    ordered = sorted(samples, key=lambda sample: (-sample.response_length, sample.index))
    page = table.samples(Asked(sort="tokens", descending=True, offset=3, limit=7))
    assert page.rows["index"] == [sample.index for sample in ordered[3:10]]
    assert page.total == len(samples) == 90
    one = table.samples(Asked(sort="index", step=1, where="reward>=2 part:format<2 status!=truncated"))
    assert one.rows["index"] == [
        s.index for s in samples if 100 <= s.index < 200 and 2 <= s.reward < 4 and s.status != "truncated"
    ]


def test_the_numbers_of_a_sample(folder: Path) -> None:
    """By hand, for a response of five tokens whose fourth is a tool's; the engine's log-probs are -1, -2, -3, 0, -5."""
    row = indexed(folder).table.samples(Asked(sort="step", where="index=2")).rows
    numbers = {
        name: row[name][0] for name in ("tokens", "trained", "log_prob", "oldest", "newest", "count:turns", "mismatch")
    }
    assert numbers == {
        "tokens": 5, "trained": 4, "log_prob": -11 / 4, "oldest": 2, "newest": 3, "count:turns": 0, "mismatch": None,
    }  # fmt: skip


def test_the_trainers_numbers_are_means_over_trained_tokens(folder: Path) -> None:
    from slime_core.algorithm.build_batch import build_batch
    from slime_core.data.table import read_groups

    batch = build_batch(read_groups(dump_file(folder / "rollouts", 1)))
    (folder / "view" / "tokens").mkdir(parents=True)
    random = np.random.default_rng(1)
    columns = TokenColumns(
        advantages=random.normal(size=len(batch.mask)).astype(np.float32),
        old_log_probs=random.normal(size=len(batch.mask)).astype(np.float32),
    )
    write_tokens(dump_file(folder / "view" / "tokens", 1), batch, columns)
    row = indexed(folder).table.samples(Asked(sort="index", step=1, limit=1000)).rows
    starts = batch.response_offsets
    for place in range(batch.num_samples):
        own = slice(starts[place], starts[place + 1])
        mask = batch.mask[own] > 0
        gap = np.abs(columns.old_log_probs[own] - batch.rollout_log_probs[own])[mask].mean()
        assert row["mismatch"][place] == pytest.approx(gap, rel=1e-5)
        assert row["advantage"][place] == pytest.approx(np.abs(columns.advantages[own])[mask].mean(), rel=1e-5)
    assert row["entropy"] == [None] * batch.num_samples
    # Of equal rewards the one that teaches most is the worst, or the best.
    for sign in (1, -1):
        ordered = indexed(folder).table.samples(Asked(sort="reward", descending=sign < 0, step=1, limit=1000)).rows
        assert ordered["index"] == [
            row["index"][place]
            for place in sorted(
                range(batch.num_samples), key=lambda place: (sign * row["reward"][place], -row["advantage"][place])
            )
        ]


def test_indexing_ends_before_the_interpreter_does(folder: Path) -> None:
    """A thread within DuckDB at that time would abort the process."""
    found = SampleSet(folder, "train")
    found.refresh()
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "index train"]
    write_groups(dump_file(folder / "rollouts", 9), make_groups(9, [["late"]]))
    found.refresh()
    assert not [thread for thread in threading.enumerate() if thread.name == "index train"]
    assert found.need(9).step == 9


def test_numbers_of_samples_are_known_before_they_are_indexed(folder: Path) -> None:
    found = SampleSet(folder, "train")
    found.close()
    (dump_file(folder / "rollouts", 9)).write_bytes(b"broken")
    found.refresh()
    assert found.index_range() == (0, 229)
    found.need(1)
    assert found.index_range() == (0, 229)
    empty = folder / "empty"
    (empty / "rollouts").mkdir(parents=True)
    assert SampleSet(empty, "train").index_range() is None


def test_groups_by_their_spread(folder: Path) -> None:
    table = indexed(folder).table
    page = table.groups(Asked(step=2, sort="group"))
    assert page.rows["group"] == [20, 21, 22, 23, 24, 25]
    assert page.rows["spread"] == pytest.approx([np.std(range(5))] * 6)
    assert (page.rows["lowest"][0], page.rows["highest"][0], page.rows["longest"][0], page.rows["samples"][0]) == (
        0,
        4,
        7,
        5,
    )
    found = table.groups(Asked(step=2, sort="group", words=SearchWords.read("gamma")))
    with_word = {s.group_index for s in written(folder) if s.group_index >= 20 and "gamma" in s.response}
    assert found.rows["group"] == sorted(with_word)


def test_what_does_not_exist_is_named(folder: Path) -> None:
    table = indexed(folder).table
    with pytest.raises(ConfigError, match=r"sort: nothing here is called 'rewrd'; close match: reward\. There are: "):
        table.samples(Asked(sort="rewrd"))
    with pytest.raises(ConfigError, match=r"where: 'reward' is no condition; write NAME<VALUE"):
        table.samples(Asked(sort="step", where="reward"))
    with pytest.raises(ConfigError, match="'half' is no number"):
        table.samples(Asked(sort="step", where="reward<half"))
    with pytest.raises(ConfigError, match="status is a text"):
        table.samples(Asked(sort="step", where="status<done"))


def test_a_step_that_is_written_again_replaces_its_rows(folder: Path) -> None:
    found = indexed(folder)
    write_groups(dump_file(folder / "rollouts", 1), make_groups(1, [["another one"]]))
    found.refresh()
    found.need(1)
    assert found.table.samples(Asked(sort="index", step=1)).rows["index"] == [100]
    assert found.table.samples(Asked(sort="index", words=SearchWords.read("another"))).total == 1
    dump_file(folder / "rollouts", 0).unlink()
    found.refresh()
    assert found.table.samples(Asked(sort="index")).total == 31
    # What a second server finds on disk is the same.
    again = indexed(folder)
    assert again.table.samples(Asked(sort="index", words=SearchWords.read("alpha"))).rows == found.table.samples(
        Asked(sort="index", words=SearchWords.read("alpha"))
    ).rows  # fmt: skip


def test_places_of_words_are_counted_as_javascript_counts() -> None:
    words = SearchWords.read('"😀 b" C')
    assert words.excerpt("a 😀😀 b c") == ("a 😀😀 b c", [(4, 8), (9, 10)])
    text, marks = words.excerpt("-" * 500 + "c" + "-" * 500)
    assert (len(text), marks) == (300, [(60, 61)])
    assert SearchWords.read("").excerpt("text") == ("text", [])
