"""Streams that grow, prompts that a function makes, and a curriculum that follows what is passed."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.types.sample import Sample, SampleGroup
from slime_plugin_kit.scripted_rollout import tokenizer
from slime_sources.config import CurriculumConfig, GeneratedConfig, StreamConfig
from slime_sources.plugin import generated_by, prompts
from slime_sources.rendering.prompt_renderer import PromptRenderer
from slime_sources.row_reader import LineReader
from slime_sources.stream import StreamSource


def renderer(**options):
    return PromptRenderer(tokenizer(), **options)


def stream(*paths, seed=1, max_prompt_len=None, **options):
    config = StreamConfig(prompt_data=[str(path) for path in paths], **options)
    return StreamSource(config, renderer(max_prompt_len=max_prompt_len), seed=seed)


def append(path, *numbers, end="\n"):
    with path.open("a") as file:
        file.write("".join(json.dumps({"input": f"{number}="}) + end for number in numbers))


def texts(source, count):
    return [prompt.text.rstrip("=") for prompt in source.take(count)]


def saved(source):
    return json.loads(json.dumps(source.state(), allow_nan=False))


def test_what_is_appended_is_drawn(tmp_path):
    file = tmp_path / "grows.jsonl"
    append(file, 0, 1)
    source = stream(file, at_end="end")
    assert texts(source, 5) == ["0", "1"]
    assert source.take(1) == []
    append(file, 2)
    state = saved(source)
    append(file, 3)
    assert texts(source, 5) == ["2", "3"]
    again = stream(file, at_end="end")
    again.restore(state)
    drawn = again.take(5)
    assert [prompt.text for prompt in drawn] == ["2=", "3="]
    assert [prompt.group_index for prompt in drawn] == [2, 3]
    assert drawn[0].origin.endswith("grows.jsonl, line 3")


def test_a_row_that_is_being_written_is_not_there_yet(tmp_path):
    file = tmp_path / "grows.jsonl"
    append(file, 0)
    with file.open("a") as writing:
        writing.write('{"input": "1')
        writing.flush()
        source = stream(file, at_end="end")
        assert texts(source, 3) == ["0"]
        writing.write('="}')
        writing.flush()
        # Whole, although no newline ends it.
        assert texts(source, 3) == ["1"]
        writing.write("\n\n")
    append(file, 2)
    assert texts(source, 3) == ["2"]


def test_it_begins_again_with_what_was_appended_since(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    append(one, 0, 1)
    append(two, 2)
    source = stream(one, two)
    assert texts(source, 4) == ["0", "1", "2", "0"]
    append(two, 3)
    assert texts(source, 6) == ["1", "2", "3", "0", "1", "2"]
    assert source.metrics["rollout/data/epoch"] == 2


def test_parquet_a_row_group_at_a_time(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    rows = pa.table(
        {"input": [f"{number}=" for number in range(10)], "metadata": [{"n": number} for number in range(10)]}
    )
    pq.write_table(rows, file, row_group_size=3)
    read, plain = [], pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, group: read.append(group) or plain(self, group))
    source = stream(file)
    drawn = source.take(7)
    assert [prompt.metadata["n"] for prompt in drawn] == list(range(7))
    assert read == [0, 1, 2]
    later = stream(file)
    later.restore(saved(source))
    assert texts(later, 5) == ["7", "8", "9", "0", "1"]


def test_draws_at_random_among_the_next_rows_keep_only_their_places(tmp_path):
    file = tmp_path / "rows.jsonl"
    append(file, *range(100))
    source = stream(file, shuffle_rows=10)
    drawn = [int(text) for text in texts(source, 100)]
    assert sorted(drawn) == list(range(100))
    assert drawn != sorted(drawn)
    assert all(number < place + 10 for place, number in enumerate(drawn))
    assert texts(stream(file, shuffle_rows=10, seed=2), 100) != [str(number) for number in drawn]
    for count in (0, 7, 95, 130):
        one, other = stream(file, shuffle_rows=10), stream(file, shuffle_rows=10)
        one.take(count)
        other.restore(saved(one))
        assert texts(one, 40) == texts(other, 40)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Twenty thousand rows pass through a reader that holds none of them."""
    file = tmp_path / "many.jsonl"
    append(file, *range(20_000))
    source = stream(file)
    state_size = len(json.dumps(source.state()))
    source.take(5_000)
    assert len(json.dumps(source.state())) < state_size + 32
    assert [name for name, value in vars(source._readers[0]).items() if isinstance(value, list | dict | bytes)] == []
    assert isinstance(source._readers[0], LineReader)


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"other": 1}', '{"input": NaN}'])
def test_a_bad_row(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    append(file, 0)
    with file.open("a") as writing:
        writing.write(line + "\n")
    append(file, 2)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2.*--on-bad-row skip"):
        stream(file).take(3)
    source = stream(file, on_bad_row="skip")
    assert texts(source, 3) == ["0", "2", "0"]
    assert source.metrics["rollout/data/num_bad_rows"] == 1


def test_a_bad_row_leaves_the_stream_where_it_was_and_can_be_passed_over_from_there(tmp_path):
    file = tmp_path / "rows.jsonl"
    append(file, 0, 1)
    with file.open("a") as more:
        more.write("{no\n")
    append(file, 3)
    source = stream(file)
    assert texts(source, 1) == ["0"]
    before = saved(source)
    with pytest.raises(DataError, match="line 3"):
        source.take(2)
    assert saved(source) == before
    again = stream(file, on_bad_row="skip")
    again.restore(before)
    assert texts(again, 2) == ["1", "3"]


@pytest.mark.parametrize("content", ["", '{"inp'])
def test_a_file_without_a_first_row_cannot_be_known_again(tmp_path, content):
    begun, empty = tmp_path / "rows.jsonl", tmp_path / "feed.jsonl"
    append(begun, 0)
    empty.write_text(content)
    with pytest.raises(DataError, match=r"feed\.jsonl: no complete row yet"):
        stream(begun, empty)


def test_too_long_prompts_are_passed_over(tmp_path):
    file = tmp_path / "rows.jsonl"
    append(file, 1, 12345, 2)
    source = stream(file, max_prompt_len=3, at_end="end")
    assert texts(source, 3) == ["1", "2"]
    assert source.metrics["rollout/data/num_too_long"] == 1


def test_a_file_that_was_rewritten_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    append(file, 0, 1, 2)
    source = stream(file)
    source.take(3)
    state = saved(source)
    file.write_text('{"input": "0="}\n')
    with pytest.raises(CheckpointError, match="shorter"):
        stream(file).restore(state)
    file.write_text('{"input": "9="}\n' * 9)
    with pytest.raises(CheckpointError, match="saved with other files"):
        stream(file).restore(state)


@pytest.mark.parametrize(("name", "text"), [("missing.jsonl", "there is no file"), ("rows.csv", "can be read")])
def test_no_file(tmp_path, name, text):
    (tmp_path / "rows.csv").touch()
    with pytest.raises(DataError, match=text):
        stream(tmp_path / name)


def squares(number, seed):
    return {"input": f"{number}x{number}+{seed}=", "label": number**2 + seed}


def test_a_function_as_a_source():
    driver = prompts("squares")(squares)
    assert (driver.__slime__.group, driver.__slime__.name) == ("slime.sources", "squares")
    source = driver.build(GeneratedConfig(num_rows=3))(renderer(label_key="label"), seed=7)
    assert [prompt.label for prompt in source.take(5)] == [7, 8, 11, 7, 8]
    later = driver.build(GeneratedConfig(num_rows=3))(renderer(label_key="label"), seed=7)
    later.restore(saved(source))
    (drawn,) = later.take(1)
    assert (drawn.label, drawn.group_index, drawn.origin.endswith("squares, row 2")) == (11, 5, True)
    other = driver.build(GeneratedConfig())(renderer(label_key="label"), seed=7)
    with pytest.raises(CheckpointError, match="function, its options or the seed"):
        other.restore(saved(source))


def test_a_function_that_makes_no_rows():
    broken = generated_by(
        prompts("broken")(lambda number, seed: "text"), lambda number, seed: "text", GeneratedConfig()
    )
    with pytest.raises(PluginError, match=r"is a str\. It must be a mapping of columns"):
        broken(renderer(), seed=0).take(1)
    long = generated_by(prompts("long")(squares), squares, GeneratedConfig())
    with pytest.raises(DataError, match="too long"):
        long(renderer(max_prompt_len=2), seed=0).take(1)


@pytest.fixture
def levels(tmp_path):
    for name in ("easy", "middle", "hard"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"input": "{name} {n}="}}\n' for n in range(5)))
    return [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("easy", "middle", "hard")]


def curriculum(levels, *, seed=3, **options):
    from slime_sources.curriculum import CurriculumSource

    return CurriculumSource(CurriculumConfig(levels=levels, **options), renderer(), seed=seed)


def scored(prompt, *rewards):
    samples = [
        Sample(
            index=4 * prompt.group_index + n,
            group_index=prompt.group_index,
            rollout_id=n,
            prompt=prompt,
            tokens=prompt.token_ids,
            prompt_length=len(prompt.token_ids),
            loss_mask=np.empty(0, np.uint8),
            rollout_log_probs=np.empty(0, np.float32),
            reward=reward,
        )
        for n, reward in enumerate(rewards)
    ]
    return SampleGroup(prompt=prompt, samples=tuple(samples))


PASSED = {"easy": (1.0, 1.0, 1.0, 1.0), "middle": (1.0, 0.0, 1.0, 0.0), "hard": (0.0, 0.0, 0.0, 0.0)}


def level_of(prompt):
    return prompt.metadata["curriculum_level"]


def test_what_is_passed_half_of_the_time_is_drawn_most(levels):
    source = curriculum(levels)
    first = [level_of(prompt) for prompt in source.take(300)]
    assert all(70 < first.count(name) < 130 for name in PASSED)
    source.observe([scored(prompt, *PASSED[level_of(prompt)]) for prompt in source.take(60)])
    # Weights 0.05, 1, 0.05.
    assert source.shares()["middle"] == pytest.approx(1 / 1.1)
    later = [level_of(prompt) for prompt in source.take(600)]
    assert 20 <= later.count("easy") + later.count("hard") <= 90
    assert source.metrics["rollout/curriculum/easy/pass_rate"] == 1.0
    # The policy learns: what was hard becomes the place to be.
    rates = {"easy": (1.0,), "middle": (1.0,), "hard": (1.0, 0.0)}
    for _ in range(12):
        source.observe([scored(prompt, *rates[level_of(prompt)]) for prompt in source.take(60)])
    assert max(source.shares(), key=source.shares().get) == "hard"


def test_rates_by_hand(levels):
    source = curriculum(levels, memory=2, pass_reward=0.5)
    prompt = next(prompt for prompt in source.take(20) if level_of(prompt) == "easy")
    rates = []
    for rewards in ((0.5, 0.4), (1.0, 1.0), (0.0, 0.0), (None, 1.0), (None, None)):
        source.observe([scored(prompt, *rewards)])
        rates.append(source.metrics["rollout/curriculum/easy/pass_rate"])
    assert rates == [0.5, 0.75, 0.375, 0.6875, 0.6875]
    stranger = scored(replace(prompt, metadata={}), 1.0)
    source.observe([stranger])
    assert source.metrics["rollout/curriculum/easy/pass_rate"] == rates[-1]


def test_position_and_rates_are_in_the_checkpoint(levels, tmp_path):
    """A run of twelve steps, and one that is stopped after five: the same prompts, each with its own number."""

    def run(buffer, steps):
        drawn = []
        for _ in range(steps):
            chosen = [item.prompt for item in buffer.get_samples(8)]
            drawn += [(prompt.group_index, prompt.text) for prompt in chosen]
            buffer.source.observe([scored(prompt, *PASSED[level_of(prompt)]) for prompt in chosen])
        return drawn

    def fresh():
        return DataBuffer(curriculum(levels, rollout_shuffle=True), PopFirstFilter())

    whole = run(fresh(), 12)
    first = fresh()
    begun = run(first, 5)
    first.save(tmp_path)
    second = fresh()
    second.load(tmp_path)
    assert begun + run(second, 7) == whole
    assert [number for number, _ in whole] == list(range(96))
    with pytest.raises(CheckpointError, match="other levels"):
        curriculum(levels[::-1]).restore(saved(first.source))
