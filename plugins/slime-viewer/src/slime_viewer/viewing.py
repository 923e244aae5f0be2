"""What `slime view` shows: the groups of a dumped step, one group, one response part by part."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slime_core.controller.run_folder import RunFolder
from slime_core.data.model_folder import load_tokenizer
from slime_core.data.table import dump_file, dumped_steps, read_groups
from slime_core.errors import ConfigError, DataError
from slime_core.types.sample import Sample, SampleGroup, Status
from slime_viewer.dumps import train_places
from slime_viewer.order import Order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIPED_WIDTH: Final = 160
"""Width of tables that are written to a file or a pipe."""
NO_POLICY: Final = -1
"""In the place of a version: no policy has sampled these tokens."""


def mean_reward(group: SampleGroup) -> float:
    """-inf without rewards: nothing good is known of it."""
    return float(np.mean(group.rewards)) if group.rewards else -math.inf


def spread(group: SampleGroup) -> float:
    return float(np.std(group.rewards)) if group.rewards else 0.0


def longest(group: SampleGroup) -> int:
    return max((sample.response_length for sample in group.samples), default=0)


FIRST: Final[Mapping[Order, Callable[[SampleGroup], float]]] = {
    Order.DRAWN: lambda group: group.group_index,
    Order.WORST: mean_reward,
    Order.BEST: lambda group: -mean_reward(group),
    Order.SPREAD: lambda group: -spread(group),
    Order.LONGEST: lambda group: -longest(group),
}
"""Least first."""


class Numbered(NamedTuple):
    """What is looked for by its number."""

    what: str
    column: str
    """Column of the dump."""
    of: Callable[[SampleGroup], Sequence[int]]


GROUP: Final = Numbered("group", "group_index", lambda group: [group.group_index])
SAMPLE: Final = Numbered("sample", "index", lambda group: [sample.index for sample in group.samples])


def show(
    folder: Path,
    *,
    step: int | None,
    order: Order,
    limit: int,
    group: int | None,
    sample: int | None,
    hf_checkpoint: Path | None,
) -> None:
    """Prints the steps, a step, a group or a sample. ConfigError or DataError if it is not there, with what is."""
    if group is not None and sample is not None:
        raise ConfigError("--group and --sample: pass only one of them.")
    rollouts, steps = find_dumps(folder)
    if step is not None and step not in steps:
        raise DataError(f"{rollouts}: step {step} is not there; there are {len(steps)}, {steps[0]} to {steps[-1]}.")
    asked = steps if step is None else [step]
    on_terminal = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=not on_terminal, width=None if on_terminal else PIPED_WIDTH)
    if sample is not None:
        of_group = find_group(rollouts, asked, SAMPLE, sample)
        tokenizer = find_tokenizer(folder, hf_checkpoint)
        console.print(prompt_of(of_group))
        for one in of_group.samples:
            if one.index == sample:
                console.print(heading(one), parts_table(one, tokenizer), sep="\n")
    elif group is not None:
        of_group = find_group(rollouts, asked, GROUP, group)
        console.print(prompt_of(of_group))
        for one in of_group.samples:
            console.print(heading(one), Text(one.raw_response), "", sep="\n")
    else:
        path = dump_file(rollouts, asked[-1])
        groups = read_groups(path)
        console.print(summary(path, asked[-1], groups))
        console.print(groups_table(sorted(groups, key=FIRST[order])[:limit]))
        if limit < len(groups):
            console.print(f"{limit} of {len(groups)} groups; --limit {len(groups)} shows all.")


def find_dumps(folder: Path) -> tuple[Path, list[int]]:
    """Where they are, and of which steps."""
    rollouts = next((place for place in train_places(folder) if dumped_steps(place)), folder)
    steps = dumped_steps(rollouts)
    if not steps:
        raise DataError(f"{folder}: no dumped rollouts there (step_*.parquet). A run writes them with --dump-rollouts.")
    return rollouts, steps


def find_group(rollouts: Path, steps: Sequence[int], numbered: Numbered, number: int) -> SampleGroup:
    """The newest that has it."""
    least, most = math.inf, -math.inf
    for step in reversed(steps):
        path = dump_file(rollouts, step)
        there = read_numbers(path, numbered.column)
        if number in there:
            return next(group for group in read_groups(path) if number in numbered.of(group))
        least, most = min([least, *there]), max([most, *there])
    where = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    raise DataError(f"{rollouts}: no {numbered.what} {number} in {where}; there are {least} to {most}.")


def read_numbers(path: Path, column: str) -> frozenset[int]:
    """The numbers in one column, such as `index`. Raises the errors of `read_groups`."""
    try:
        table = pq.read_table(path, columns=[column])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    if column not in table.column_names:
        raise DataError(f"{path}: not a table of sample groups: it lacks {column}")
    return frozenset(table[column].drop_null().to_pylist())


def find_tokenizer(folder: Path, asked: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer in `asked`, or that of the run's model. Its remote code is trusted only if the run trusted it."""
    found = RunFolder(folder).read_manifest()
    if asked is None and found is None:
        raise ConfigError(
            f"{folder}: no run there (no manifest.json), so its tokenizer is not known: --hf-checkpoint FOLDER."
        )
    known = found or {"trust_remote_code": False}
    return load_tokenizer(
        asked or Path(known["config"]["model"]["hf_checkpoint"]), trust_remote_code=known["trust_remote_code"]
    )


# ---------------------------------------------------------------- a step


def summary(path: Path, step: int, groups: Sequence[SampleGroup]) -> str:
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    facts = [f"{len(groups)} groups, {len(samples)} responses"]
    if rewards:
        facts.append(f"reward {np.mean(rewards):.3f}")
    if samples:
        facts.append(f"{np.mean([sample.response_length for sample in samples]):,.0f} tokens on average")
    facts += [
        f"{count} {status}"
        for status, count in Counter(s.status for s in samples).items()
        if status != Status.COMPLETED
    ]
    return f"[bold]step {step}[/] of {escape(str(path))}: {', '.join(facts)}"


def groups_table(groups: Sequence[SampleGroup]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group", justify="right")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("answers", "reward", "lowest", "highest", "tokens", "longest", "cut", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        rewards, samples = group.rewards, group.samples
        facts = [f"{mean_reward(group):.3f}", f"{min(rewards):g}", f"{max(rewards):g}"] if rewards else ["-"] * 3
        lengths = [sample.response_length for sample in samples]
        table.add_row(
            str(group.group_index),
            Text(last_words(group)),
            str(len(samples)),
            *facts,
            f"{np.mean(lengths):,.0f}" if lengths else "-",
            f"{longest(group):,}",
            str(sum(sample.status is Status.TRUNCATED for sample in samples) or ""),
            versions({span.version for sample in samples for span in sample.spans}),
        )
    return table


def last_words(group: SampleGroup) -> str:
    """The last message of a conversation; those before it are often the same in all prompts."""
    messages = group.prompt.messages
    text = messages[-1]["content"] if messages else group.prompt.text
    return " ".join(str(text).split())


def versions(found: set[int]) -> str:
    if not found:
        return "-"
    return str(min(found)) if len(found) == 1 else f"{min(found)} to {max(found)}"


# ---------------------------------------------------------------- a group, a response


def prompt_of(group: SampleGroup) -> Text:
    prompt = group.prompt
    facts = [f"group {group.group_index}", f"{len(prompt.token_ids):,} tokens"]
    facts += [prompt.origin] if prompt.origin else []
    facts += [f"{len(prompt.images)} images"] if prompt.images else []
    facts += [f"label {prompt.label!r}"] if prompt.label is not None else []
    return Text.assemble((", ".join(facts), "bold"), "\n", prompt.text, "\n")


def heading(sample: Sample) -> Text:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.reward_parts.items())
    facts = [
        f"{reward} ({parts})" if parts else reward,
        f"{sample.response_length:,} tokens, {sample.num_trainable:,} trained",
        str(sample.status),
        *(f"{name} {value:g}" for name, value in sample.counts.items()),
    ]
    if sample.remove_sample:
        facts.append("trains nothing")
    return Text(f"sample {sample.index}: {', '.join(facts)}", style="bold")


@dataclass(frozen=True, slots=True)
class Part:
    """Response tokens `[start, end)` of one policy version, or of a tool or the environment."""

    start: int
    end: int
    trained: bool
    version: int
    """`NO_POLICY`: a tool or the environment."""


def parts_of(sample: Sample) -> Iterator[Part]:
    version = np.full(sample.response_length, NO_POLICY)
    for span in sample.spans:
        version[span.start : span.end] = span.version
    changes = (np.diff(version) != 0) | (np.diff(sample.loss_mask) != 0)
    for start, end in pairwise([0, *(np.flatnonzero(changes) + 1), sample.response_length]):
        if start < end:
            yield Part(int(start), int(end), bool(sample.loss_mask[start]), int(version[start]))


def parts_table(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "written by", "trained", "log-prob"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", ratio=1)
    for part in parts_of(sample):
        tokens, log_probs = (x[part.start : part.end] for x in (sample.response_tokens, sample.rollout_log_probs))
        table.add_row(
            f"{part.start:,} to {part.end:,}",
            "-" if part.version == NO_POLICY else f"version {part.version}",
            "yes" if part.trained and not sample.remove_sample else "",
            f"{log_probs.mean():.3f}" if part.trained else "",
            Text(str(tokenizer.decode(tokens)), style="" if part.trained else "dim"),
        )
    return table
