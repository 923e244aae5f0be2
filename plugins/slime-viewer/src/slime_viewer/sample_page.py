"""One sample as the page shows it: prompt, turns, rewards, and each token with its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.errors import DataError, SlimeError
from slime_viewer.not_there import NotThere
from slime_viewer.open_run import OpenRun
from slime_viewer.sample_numbers import StepFile, trainer_columns
from slime_viewer.sample_set import SampleSet
from slime_viewer.sample_table import Asked
from slime_viewer.token_text import token_pieces

ROWS_TOGETHER: Final = 64
"""Rows that are decoded at once on the way to one."""
NO_POLICY: Final = -1
MOST_SIBLINGS: Final = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """How a column of tokens is named and coloured."""

    name: str
    title: str
    scale: str


TRAINER: Final[Mapping[str, Kind]] = {
    "advantages": Kind("advantage", "Advantage", "diverging"),
    "old_log_probs": Kind("log_prob", "Log-prob (trainer)", "sequential"),
    "entropy": Kind("entropy", "Entropy", "sequential"),
    "ref_log_probs": Kind("ref_log_prob", "Log-prob (reference)", "sequential"),
    "teacher_log_probs": Kind("teacher_log_prob", "Log-prob (teacher)", "sequential"),
    "values": Kind("value", "Value", "diverging"),
    "returns": Kind("return", "Return", "diverging"),
    "correction": Kind("correction", "Correction weight", "sequential"),
    "loss_weight": Kind("loss_weight", "Loss weight", "sequential"),
}
"""Columns of the trainer, in the order of the page."""
ENGINE: Final = Kind("rollout_log_prob", "Log-prob (engine)", "sequential")
MISMATCH: Final = Kind("mismatch", "Trainer minus engine", "diverging")
MASK: Final = Kind("mask", "Trained", "category")
VERSION: Final = Kind("version", "Weight version", "category")


class NoRow(DataError):
    """A file has fewer rows."""


def read_row(path: Any, row: int, columns: Sequence[str] | None = None, *, all_but: Sequence[str] = ()) -> pa.Table:
    """One row of a Parquet file. DataError if it cannot be read, NoRow if it has no such row."""
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name not in all_but]
            asked = names if columns is None else [name for name in columns if name in names]
            first = 0
            for batch in file.iter_batches(ROWS_TOGETHER, columns=asked, use_threads=False):
                if row < first + len(batch):
                    return pa.table(batch.slice(row - first, 1))
                first += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    raise NoRow(f"{path}: has {first} rows, and row {row} is asked for.")


def sample_page(run: OpenRun, found_set: SampleSet, index: int, part: int, step: int | None) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/sample`. `step`: an indexed one. NotThere, with what there is, if it is not there."""
    set_name = found_set.name
    at = found_set.table.at(index, part, step)
    if at is None and step is None:
        found_set.find(index)
        at = found_set.table.at(index, part, step)
    if at is None:
        known = found_set.index_range()
        there = "there is none" if known is None else f"there are {known[0]} to {known[1]}"
        where = set_name if step is None else f"step {step} of {set_name}"
        raise NotThere(f"{run.path}: no sample {index}{f', part {part},' if part else ''} in {where}; {there}.")
    file = found_set.need(at[0])
    row = read_row(file.groups, at[1], all_but=("images", "routed_experts", "routed_experts_sizes"))
    of = row.to_pylist()[0]
    response = np.asarray(of["tokens"][of["prompt_length"] :])
    siblings = found_set.table.samples(
        Asked(step=at[0], group=of["group_index"], sort="step", limit=MOST_SIBLINGS)
    ).rows
    number = siblings_place(siblings, index, part)
    columns = token_columns(of, trainer_row(file, found_set.table.place_of(at[0], at[1]), index))
    tokens, problem = pieces_of(run, response)
    return {
        "set": set_name,
        "at": {"step": at[0], "index": index, "part": part},
        "group": of["group_index"],
        "origin": of["origin"],
        "label": from_json(of["label"]),
        "metadata": from_json(of["metadata"]),
        "status": of["status"],
        "reward": of["reward"],
        "parts": dict(of["reward_parts"]),
        "counts": dict(of["counts"]),
        "trains": not of["remove_sample"] and bool(np.any(of["loss_mask"])),
        "prompt": {
            "text": of["prompt"],
            "messages": from_json(of["messages"]),
            "tools": from_json(of["tools"]),
            "tokens": len(of["prompt_token_ids"]),
            "images": num_images(file, siblings["row"][number - part] if number >= part else at[1]),
        },
        "turns": turns_of(of, tokens, len(response)),
        "tokens": {"ids": response, "text": tokens, "problem": problem, "columns": columns},
        "siblings": [
            {"at": {"step": at[0], "index": index, "part": part}, "reward": reward, "tokens": length, "status": status}
            for index, part, reward, length, status in zip(
                *(siblings[name] for name in ("index", "part", "reward", "tokens", "status")), strict=True
            )
        ],
        "span_rewards": of["span_rewards"],
        "calls": calls_of(run, index, set_name),
    }


def siblings_place(siblings: Mapping[str, Sequence[Any]], index: int, part: int) -> int:
    return next(
        place for place, at in enumerate(zip(siblings["index"], siblings["part"], strict=True)) if at == (index, part)
    )


def num_images(file: StepFile, row: int) -> int:
    """Images of the prompt; null in the file where they are those of the row before."""
    found = read_row(file.groups, row, ["images"])
    if "images" not in found.column_names:
        return 0
    images = found["images"].combine_chunks()
    return int(images.value_lengths()[0].as_py() or 0)


def pieces_of(run: OpenRun, ids: npt.NDArray[Any]) -> tuple[list[str] | None, str | None]:
    """The text of each token, or why there is none."""
    try:
        tokenizer = run.tokenizer
    except SlimeError as error:
        return None, str(error)
    return token_pieces(tokenizer, ids.tolist()), None


def trainer_row(file: StepFile, place: int, index: int) -> Mapping[str, npt.NDArray[Any]]:
    """The trainer's columns of one sample, (R,) each; empty where they are of other samples, or there are none."""
    if file.tokens is None:
        return {}
    known = {*TRAINER, *(f"column_{name}" for name in TRAINER), "index"}
    try:
        row = trainer_columns(read_row(file.tokens, place, sorted(known)))
    except NoRow:
        return {}
    if "index" not in row.column_names or row["index"][0].as_py() != index:
        return {}
    return {name: np.asarray(row[name][0].values.to_numpy()) for name in TRAINER if name in row.column_names}


def token_columns(of: Mapping[str, Any], trainer: Mapping[str, npt.NDArray[Any]]) -> list[dict[str, Any]]:
    """Columns over the response tokens; NaN where a token has no such number."""
    mask = np.asarray(of["loss_mask"], np.int64)
    engine = np.asarray(of["rollout_log_probs"], np.float64)
    version = np.full(len(mask), np.nan)
    for span in of["spans"]:
        version[span["start"] : span["end"]] = span["version"]
    by_policy = ~np.isnan(version) | (mask > 0)

    def column(kind: Kind, values: npt.NDArray[Any]) -> dict[str, Any]:
        return {"name": kind.name, "title": kind.title, "scale": kind.scale, "values": values}

    found = [
        column(TRAINER[name], np.where(by_policy, values.astype(np.float64), np.nan))
        for name, values in trainer.items()
        if len(values) == len(mask)
    ]
    found.append(column(ENGINE, np.where(by_policy, engine, np.nan)))
    old = trainer.get("old_log_probs")
    if old is not None and len(old) == len(engine):
        found.append(column(MISMATCH, np.where(mask > 0, old.astype(np.float64) - engine, np.nan)))
    return [*found, column(MASK, mask), column(VERSION, version)]


def turns_of(of: Mapping[str, Any], pieces: Sequence[str] | None, length: int) -> list[dict[str, Any]]:
    """Consecutive tokens of one policy version, or of the environment: those that no policy sampled."""
    version = np.full(length, NO_POLICY)
    for span in of["spans"]:
        version[span["start"] : span["end"]] = span["version"]
    if not of["spans"]:
        version[np.asarray(of["loss_mask"], np.bool_)] = NO_POLICY - 1
    edges = [0, *(np.flatnonzero(np.diff(version)) + 1).tolist(), length] if length else [0]
    whole = of["raw_response"] or of["response"] or ""
    turns = []
    for start, end in pairwise(edges):
        text = "".join(pieces[start:end]) if pieces is not None else whole if end - start == length else ""
        written_by = int(version[start])
        turns.append(
            {
                "start": start,
                "end": end,
                "by": "environment" if written_by == NO_POLICY else "policy",
                "version": written_by if written_by > NO_POLICY else None,
                "text": text,
            }
        )
    return turns


def calls_of(run: OpenRun, index: int, set_name: str) -> list[dict[str, Any]] | None:
    """From traces.jsonl: the engine calls of the sample's last attempt."""
    scope = "train" if set_name == "train" else f"eval-{set_name}"
    sought = f'"sample": {index},'
    found: list[dict[str, Any]] | None = None
    try:
        with run.folder.traces.open(encoding="utf-8") as lines:
            for line in lines:
                if sought in line and line.endswith("\n"):
                    trace = json.loads(line)
                    if (trace["scope"], trace["sample"]) == (scope, index):
                        found = [call_of(turn) for turn in trace["turns"]]
    except (OSError, ValueError, KeyError, TypeError):
        return found
    return found


def call_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "queue": turn["queue_s"],
        "generate": turn["generate_s"],
        "prompt_tokens": turn["prompt_tokens"],
        "cached_tokens": turn["cached_tokens"],
        "tokens": turn["tokens"],
        "engine": turn["engine"],
        "finish": turn["finish"],
    }


def from_json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
