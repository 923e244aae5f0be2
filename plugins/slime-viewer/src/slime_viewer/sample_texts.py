"""SampleTexts: prompts and responses of the steps of a set, and which of them have the words of a search."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slime_viewer.sample_index import PLACES, StepIndex
from slime_viewer.search_words import SearchWords

Int64 = npt.NDArray[np.int64]

STEP_SHIFT: Final = 2**32
"""A sample's `uid`: its step x this + its place among the step's samples."""
READ_TOGETHER: Final = 2**26
"""Bytes of texts that are searched at once."""
FEW: Final = 200
"""Less than one text of so many is read by itself; else all texts of the step are."""


def uids_of(numbers: pa.Table) -> Int64:
    """Of the samples of one step."""
    return np.asarray(numbers["step"].to_numpy() * STEP_SHIFT + np.arange(numbers.num_rows), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StepTexts:
    """Where the texts of a step are in their file."""

    index: StepIndex
    rows: int
    prompt: Int64
    """(rows,) number of its prompt among the distinct ones."""
    prompt_ends: Int64
    """(prompts + 1,) bytes"""
    response_ends: Int64
    """(rows + 1,) bytes"""

    @classmethod
    def of(cls, index: StepIndex, numbers: pa.Table) -> StepTexts:
        start, end, first, last = (numbers[name].to_numpy() for name in PLACES)
        starts, prompt = np.unique(start, return_inverse=True)
        prompt_end = [int(end[start == starts[-1]][0])] if len(starts) else [0]
        response_end = [int(last[-1])] if len(last) else [0]
        return cls(
            index=index,
            rows=numbers.num_rows,
            prompt=prompt,
            prompt_ends=np.append(starts, prompt_end),
            response_ends=np.append(first, response_end),
        )

    @property
    def num_bytes(self) -> int:
        return int(self.response_ends[-1])

    def arrays(self, memory: memoryview) -> tuple[pa.Array, pa.Array]:
        """Distinct prompts and all responses, read from the file into `memory`, (num_bytes,)."""
        self.index.read_texts(memory)
        texts = pa.py_buffer(memory)
        prompts, responses = (
            pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), texts)
            for ends in (self.prompt_ends, self.response_ends)
        )
        return prompts, responses

    def some(self, places: Int64) -> tuple[pa.Array, pa.Array]:
        """The prompts, each once, and the responses of a few samples."""
        prompt = np.unique(self.prompt[places])
        prompts = np.stack([self.prompt_ends[prompt], self.prompt_ends[prompt + 1]], axis=1)
        responses = np.stack([self.response_ends[places], self.response_ends[places + 1]], axis=1)
        texts = pa.array(self.index.texts(np.concatenate([prompts, responses])), pa.large_string())
        return texts[: len(prompts)], texts[len(prompts) :]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Samples that a search has to read: places of samples by step."""

    places: Mapping[int, Int64]

    @classmethod
    def of_uids(cls, uids: Int64) -> Candidates:
        ordered = np.sort(uids)
        steps, first = np.unique(ordered // STEP_SHIFT, return_index=True)
        return cls(dict(zip(steps.tolist(), np.split(ordered % STEP_SHIFT, first[1:]), strict=True)))

    @property
    def count(self) -> int:
        return sum(map(len, self.places.values()))

    def table(self) -> pa.Table:
        """The column `uid`."""
        return pa.table({"uid": joined([places + step * STEP_SHIFT for step, places in self.places.items()])})


class SampleTexts:
    """Texts are read from their files each time; in memory there is only where they are."""

    def __init__(self, database: duckdb.DuckDBPyConnection) -> None:
        """`database`: matches patterns."""
        self._database = database
        self._steps: dict[int, StepTexts] = {}
        self._reading = threading.Lock()
        self._memory = memoryview(bytearray())
        """For texts that are read, used again: memory that is new to a process costs more than reading a file into it."""

    @property
    def rows(self) -> int:
        return sum(step.rows for step in list(self._steps.values()))

    def key_of(self, step: int) -> str | None:
        there = self._steps.get(step)
        return None if there is None else there.index.key

    def add(self, index: StepIndex, numbers: pa.Table) -> None:
        self._steps[index.step] = StepTexts.of(index, numbers)

    def remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._steps.pop(step, None)

    def of(self, page: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
        """Prompt and response of each row; `page` has the columns `step` and PLACES."""
        found: list[tuple[str, str]] = [("", "")] * len(page["step"])
        of_step: dict[int, list[int]] = {}
        for row, step in enumerate(page["step"]):
            of_step.setdefault(step, []).append(row)
        for step, rows in of_step.items():
            places = np.array([[page[name][row] for name in PLACES] for row in rows], np.int64)
            texts = self._steps[step].index.texts(places.reshape(-1, 2))
            for number, row in enumerate(rows):
                found[row] = texts[2 * number], texts[2 * number + 1]
        return found

    def candidates(self, words: SearchWords, step: int | None) -> Candidates:
        """Samples whose signatures allow the words, of one step or of all."""
        bits = words.bits
        steps = (
            list(self._steps.items()) if step is None else [(step, self._steps[step])] if step in self._steps else []
        )
        places = {number: there.index.with_bits(bits, there.rows) for number, there in steps}
        return Candidates({number: found for number, found in places.items() if len(found)})

    def with_words(self, words: SearchWords, candidates: Candidates) -> pa.Table:
        """The column `uid` of those that have all words."""
        found: list[Int64] = []
        with self._reading:
            rest = list(candidates.places.items())
            while rest:
                number, size = 1, self._steps[rest[0][0]].num_bytes
                while number < len(rest) and size + self._steps[rest[number][0]].num_bytes <= READ_TOGETHER:
                    size += self._steps[rest[number][0]].num_bytes
                    number += 1
                if size > len(self._memory):
                    self._memory = memoryview(bytearray(max(size, READ_TOGETHER)))
                found.append(self._read(words, rest[:number]))
                rest = rest[number:]
        return pa.table({"uid": joined(found)})

    def _read(self, words: SearchWords, reading: Sequence[tuple[int, Int64]]) -> Int64:
        """Those samples at these places of these steps that have all words."""
        responses, prompts, numbers, uids = [], [], [], []
        known, at = 0, 0
        for step, places in reading:
            there = self._steps[step]
            if FEW * len(places) < there.rows:
                some_prompts, some_responses = there.some(places)
                number = np.unique(there.prompt[places], return_inverse=True)[1]
            else:
                some_prompts, all_responses = there.arrays(self._memory[at : at + there.num_bytes])
                at += there.num_bytes
                all_of_them = len(places) == there.rows
                some_responses = all_responses if all_of_them else all_responses.take(pa.array(places))
                number = there.prompt[places]
            responses.append(some_responses)
            prompts.append(some_prompts)
            numbers.append(number + known)
            uids.append(places + step * STEP_SHIFT)
            known += len(some_prompts)
        number = np.concatenate(numbers)
        has = np.ones(len(number), np.bool_)
        in_both = zip(self._matches(responses, words), self._matches(prompts, words), strict=True)
        for in_responses, in_prompts in in_both:
            has &= in_responses | in_prompts[number]
        return np.concatenate(uids)[has]

    def _matches(self, texts: Sequence[pa.Array], words: SearchWords) -> list[npt.NDArray[np.bool_]]:
        """For each word: which texts have it, (texts,)."""
        cursor = self._database.cursor()
        cursor.register("texts", pa.table({"text": pa.chunked_array(texts)}))
        asked = ", ".join(f"regexp_matches(text, ?) AS w{number}" for number in range(len(words.words)))
        found = cursor.execute(f"SELECT {asked} FROM texts", words.patterns).fetchnumpy()
        return [found[f"w{number}"] for number in range(len(words.words))]


def joined(arrays: Sequence[Int64]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *arrays])
