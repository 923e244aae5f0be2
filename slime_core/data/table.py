"""Sample groups as an Arrow table, and as a Parquet file: rollout dumps, replay, the buffer's checkpoint.

One row per sample, in order. `group` numbers the groups of the table. A group whose own prompt is not its first
sample's (or that has no samples) begins with a row for that prompt, in which the sample's columns are null.
The images of a prompt are in its group's first row with that prompt: null in a row means those of the row before.
User values (label, messages, tools, metadata) are JSON text; everything else keeps its type and bits. The columns of expert ids
exist if any sample has them: flat, with their sizes in another column. `raw_response` is null where `response` is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.atomic_io.atomic_file import write_atomically
from slime_core.atomic_io.json_text import json_text
from slime_core.errors import DataError
from slime_core.types.image import Image
from slime_core.types.prompt import Prompt
from slime_core.types.routed_experts import RoutedExperts, narrow
from slime_core.types.sample import Sample, SampleGroup, SpanReward, Status, VersionSpan

IMAGE_BYTES_TOGETHER: Final = 2**28
"""Average per row group: rows may differ several times in size."""

_SPAN: Final = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_IMAGE: Final = pa.struct(
    [
        ("name", pa.string()),
        ("data", pa.binary()),
        ("places", pa.list_(pa.int32())),
        ("num_tokens", pa.int32()),
        ("frames", pa.int32()),
        ("seconds", pa.list_(pa.float64())),
    ]
)
_SPAN_REWARD: Final = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("value", pa.float64())])

RAW_RESPONSE: Final = "raw_response"

SCHEMA: Final = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("group_index", pa.int64(), nullable=False),
        ("index", pa.int64()),
        ("rollout_id", pa.int64()),
        ("credit_key", pa.int64()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("remove_sample", pa.bool_()),
        pa.field("prompt", pa.string(), nullable=False),
        ("response", pa.string()),
        (RAW_RESPONSE, pa.string()),
        ("label", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        pa.field("prompt_metadata", pa.string(), nullable=False),
        ("metadata", pa.string()),
        ("counts", pa.map_(pa.string(), pa.float64())),
        pa.field("origin", pa.string(), nullable=False),
        ("images", pa.list_(_IMAGE)),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        ("prompt_length", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("rollout_log_probs", pa.list_(pa.float32())),
        ("spans", pa.list_(_SPAN)),
        ("span_rewards", pa.list_(_SPAN_REWARD)),
    ]
)

ROUTED_EXPERTS: Final = pa.schema(
    [("routed_experts", pa.large_list(pa.uint16())), ("routed_experts_sizes", pa.list_(pa.int32()))]
)
"""(F, layers, top_k) flat, and [layers, top_k]; null for a sample without. With 48 layers and 8 experts, a step of six million
tokens has more ids than 32-bit offsets allow."""

_AS_THEY_ARE: Final = ("index", "rollout_id", "credit_key", "reward", "remove_sample", "response", "prompt_length")
"""Columns named like the attribute of the sample."""

# Log-probs hardly repeat: side by side, their bytes take 15 % less than through a dictionary (1M normal draws, zstd).
_BYTE_WISE: Final = {"rollout_log_probs.list.element": "BYTE_STREAM_SPLIT"}
_REPEATED: Final = ["status", "prompt", "label", "messages", "tools", "prompt_metadata", "metadata", "origin"]
_REPEATED_LISTS: Final = [
    f"{name}.list.element" for name in ("prompt_token_ids", "tokens", "loss_mask", "routed_experts")
]


def groups_to_table(groups: Sequence[SampleGroup]) -> pa.Table:
    """Raises DataError, with sample and key, if a label or metadata cannot be JSON."""
    rows = [(number, prompt, sample) for number, group in enumerate(groups) for prompt, sample in _rows_of(group)]
    prompts = [prompt for _, prompt, _ in rows]
    samples = [sample for _, _, sample in rows]

    def of_sample(value: Callable[[Sample], Any]) -> list[Any]:
        return [None if sample is None else value(sample) for sample in samples]

    columns: dict[str, Any] = {
        "group": [number for number, _, _ in rows],
        "group_index": [prompt.group_index for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "origin": [prompt.origin for prompt in prompts],
        "images": _first_images([(number, prompt.images) for number, prompt, _ in rows]),
        "prompt_token_ids": _ragged([prompt.token_ids for prompt in prompts], np.int32),
        "label": [_optional_json(prompt.label, prompt, "the label") for prompt in prompts],
        "messages": [_optional_json(prompt.messages, prompt, "the messages") for prompt in prompts],
        "tools": [_optional_json(prompt.tools, prompt, "the tools") for prompt in prompts],
        "prompt_metadata": [_optional_json(prompt.metadata, prompt, "the metadata") for prompt in prompts],
        "metadata": of_sample(lambda s: json_text(s.metadata, f"sample {s.index}: the metadata")),
        RAW_RESPONSE: of_sample(lambda s: None if s.raw_response == s.response else s.raw_response),
        "status": of_sample(lambda s: s.status.value),
        "reward_parts": of_sample(lambda s: list(s.reward_parts.items())),
        "counts": of_sample(lambda s: list(s.counts.items())),
        "tokens": _ragged(of_sample(lambda s: s.tokens), np.int32),
        "loss_mask": _ragged(of_sample(lambda s: s.loss_mask), np.uint8),
        "rollout_log_probs": _ragged(of_sample(lambda s: s.rollout_log_probs), np.float32),
        "spans": of_sample(lambda s: [span._asdict() for span in s.spans]),
        "span_rewards": of_sample(lambda s: [span._asdict() for span in s.span_rewards]),
    }
    columns |= {name: of_sample(attrgetter(name)) for name in _AS_THEY_ARE}
    experts = of_sample(attrgetter("routed_experts"))
    if all(ids is None for ids in experts):
        return pa.table(columns, schema=SCHEMA)
    flat = [None if ids is None else ids.astype(np.uint16).reshape(-1) for ids in experts]
    columns["routed_experts"] = _ragged(flat, np.uint16, of=pa.LargeListArray)
    columns["routed_experts_sizes"] = [None if ids is None else ids.shape[1:] for ids in experts]
    return pa.table(columns, schema=pa.schema([*SCHEMA, *ROUTED_EXPERTS]))


def table_to_groups(table: pa.Table) -> list[SampleGroup]:
    """Returns groups equal to those written; other columns are ignored. Raises DataError if a column is missing."""
    if RAW_RESPONSE not in table.column_names:
        # Slime 0.2 wrote the text with special tokens as the response.
        table = table.append_column(RAW_RESPONSE, pa.nulls(table.num_rows, pa.string()))
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise DataError(f"not a table of sample groups: it lacks {', '.join(missing)}")
    lists = {name: _slices(table[name]) for name in ("prompt_token_ids", "tokens", "loss_mask", "rollout_log_probs")}
    plain = {name: table[name].to_pylist() for name in SCHEMA.names if name not in lists}
    routed = _read_experts(table)
    groups = []
    for _, members in groupby(range(table.num_rows), key=plain["group"].__getitem__):
        prompts: list[Prompt] = []
        samples = []
        for row in members:
            prompts.append(_read_prompt(row, plain, lists, prompts[-1] if prompts else None))
            if plain["index"][row] is not None:
                samples.append(_read_sample(row, plain, lists, prompts[-1], routed[row]))
        groups.append(SampleGroup(prompt=prompts[0], samples=tuple(samples)))
    return groups


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table of groups, perhaps with added columns, as zstd-compressed Parquet. Raises StorageError if that fails."""
    write_atomically(
        path,
        lambda aside: pq.write_table(
            table,
            aside,
            compression="zstd",
            use_dictionary=[*_REPEATED, *_REPEATED_LISTS],
            column_encoding=_BYTE_WISE,
            row_group_size=rows_together(table["images"]),
        ),
    )


def rows_together(images: pa.ChunkedArray) -> int | None:
    """Rows per row group; None: the default. Arrow reads lists of images above 2 GiB only from several row groups."""
    if images.nbytes <= IMAGE_BYTES_TOGETHER:
        return None
    return max(1, len(images) * IMAGE_BYTES_TOGETHER // int(images.nbytes))


def write_groups(path: Path, groups: Sequence[SampleGroup]) -> None:
    write_table(path, groups_to_table(groups))


def read_groups(path: Path) -> list[SampleGroup]:
    """Raises DataError if the file is missing, truncated or of another kind."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    try:
        return table_to_groups(table)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _rows_of(group: SampleGroup) -> Iterable[tuple[Prompt, Sample | None]]:
    if not group.samples or not _same_prompt(group.prompt, group.samples[0].prompt):
        yield group.prompt, None
    for sample in group.samples:
        if not sample.group_index == sample.prompt.group_index == group.group_index:
            raise DataError(
                f"sample {sample.index} has group_index {sample.group_index} and its prompt "
                f"{sample.prompt.group_index}, but it is in group {group.group_index}"
            )
        yield sample.prompt, sample


def _same_prompt(one: Prompt, other: Prompt) -> bool:
    names = ("group_index", "text", "label", "messages", "tools", "metadata", "images", "origin")
    return one is other or (
        np.array_equal(one.token_ids, other.token_ids)
        and all(getattr(one, name) == getattr(other, name) for name in names)
    )


def _first_images(rows: Sequence[tuple[int, tuple[Image, ...]]]) -> list[list[dict[str, Any]] | None]:
    """Images of each row; None if it has those of the row before, in the same group."""
    written: list[list[dict[str, Any]] | None] = []
    for place, (group, images) in enumerate(rows):
        repeated = place > 0 and rows[place - 1] == (group, images)
        written.append(None if repeated else [asdict(image) for image in images])
    return written


def _optional_json(value: Any, prompt: Prompt, what: str) -> str | None:
    return None if value is None else json_text(value, f"{prompt.origin or f'prompt {prompt.group_index}'}: {what}")


def _ragged(arrays: Sequence[npt.NDArray[Any] | None], dtype: type[np.generic], of: Any = pa.ListArray) -> pa.Array:
    """`of`: the list type, which decides the width of its offsets."""
    width = np.int64 if of is pa.LargeListArray else np.int32
    offsets = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=width)
    flat = np.concatenate([np.empty(0, dtype), *(array for array in arrays if array is not None)])
    # concatenate would promote silently: 64-bit tokens are an error of a generator.
    assert flat.dtype == dtype, f"expected {dtype.__name__} vectors, found {flat.dtype}"
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return of.from_arrays(pa.array(offsets), pa.array(flat), mask=missing)


def _slices(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    """One array per row, each with its own memory; empty for null."""
    rows: list[npt.NDArray[Any]] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy()
        rows += [values[start:end].copy() for start, end in pairwise(offsets)]
    return rows


def _read_prompt(row: int, plain: dict[str, Any], lists: dict[str, Any], previous: Prompt | None) -> Prompt:
    prompt = Prompt(
        group_index=plain["group_index"][row],
        text=plain["prompt"][row],
        token_ids=lists["prompt_token_ids"][row],
        label=_from_json(plain["label"][row]),
        messages=_from_json(plain["messages"][row]),
        tools=_from_json(plain["tools"][row]),
        metadata=_from_json(plain["prompt_metadata"][row]),
        images=_read_images(plain["images"][row], previous),
        origin=plain["origin"][row],
    )
    return previous if previous is not None and _same_prompt(previous, prompt) else prompt


def _read_images(written: list[dict[str, Any]] | None, previous: Prompt | None) -> tuple[Image, ...]:
    if written is None:
        return () if previous is None else previous.images
    return tuple(
        Image(**{**image, "places": tuple(image["places"]), "seconds": tuple(image["seconds"])}) for image in written
    )


def _read_experts(table: pa.Table) -> list[RoutedExperts | None]:
    if "routed_experts" not in table.column_names:
        return [None] * table.num_rows
    sizes = table["routed_experts_sizes"].to_pylist()
    rows = zip(_slices(table["routed_experts"]), sizes, strict=True)
    return [None if size is None else narrow(ids.reshape(-1, *size)) for ids, size in rows]


def _read_sample(
    row: int, plain: dict[str, Any], lists: dict[str, Any], prompt: Prompt, routed_experts: RoutedExperts | None
) -> Sample:
    return Sample(
        group_index=plain["group_index"][row],
        prompt=prompt,
        tokens=lists["tokens"][row],
        loss_mask=lists["loss_mask"][row],
        rollout_log_probs=lists["rollout_log_probs"][row],
        spans=tuple(VersionSpan(**span) for span in plain["spans"][row]),
        raw_response=plain[RAW_RESPONSE][row] or "",
        status=Status(plain["status"][row]),
        reward_parts=dict(plain["reward_parts"][row]),
        span_rewards=tuple(SpanReward(**span) for span in plain["span_rewards"][row]),
        metadata=_from_json(plain["metadata"][row]),
        routed_experts=routed_experts,
        counts=dict(plain["counts"][row]),
        **{name: plain[name][row] for name in _AS_THEY_ARE},
    )


def _from_json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def dump_file(folder: Path, step: int) -> Path:
    """File of the dumped groups of a step."""
    return folder / f"step_{step:06d}.parquet"


def dumped_steps(folder: Path) -> list[int]:
    """Steps with a dump, in order."""
    numbers = (path.stem.removeprefix("step_") for path in folder.glob("step_*.parquet"))
    return sorted(int(number) for number in numbers if number.isdigit())
