"""Shared prompts: shortens a micro-batch's stream by tokens that would be computed twice, or whose output is not read.

The responses of a group continue one prompt, so the prompt's hidden states are the same in each of them: they are
computed once, and every response's attention reads the same keys and values. The last token of a response is left out as
well, since nothing reads what comes after it. Log-probs and gradients are those of the whole stream, up to rounding;
what is saved is linear work for (responses - 1) x prompt + responses tokens.

(Prefix Grouper, arXiv:2506.05433, splits attention for this; here keys are gathered, which any kernel understands.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from slime_core.types.batch import ragged_positions
from slime_core.types.microbatch import MicroBatch
from slime_training.segment_table import Int64, SegmentTable


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedStream:
    """The shorter stream: the source of its tokens, and how they attend."""

    source: Int64
    """Positions in the whole stream."""
    logit_index: Int64
    """Positions in the shorter one. They may repeat: all responses to a prompt are predicted from its last token."""
    table: SegmentTable


def share_prompts(micro: MicroBatch) -> tuple[MicroBatch, SegmentTable] | None:
    """Returns the shorter stream: prompts first, then responses. None if no two neighbouring samples share a prompt. The
    response axis is unchanged."""
    stream = plan_stream(micro)
    return None if stream is None else (select(micro, stream), stream.table)


def plan_stream(micro: MicroBatch) -> SharedStream | None:
    starts = micro.cu_seqlens.numpy().astype(np.int64)[:-1]
    tokens, logit_index = micro.tokens.numpy(), micro.logit_index.numpy()
    response_lengths = np.bincount(micro.segments.numpy(), minlength=micro.num_samples)
    # For a sample without a response no output is read.
    read = np.flatnonzero(response_lengths)
    starts, response_lengths = starts[read], response_lengths[read]
    first_row = np.cumsum(response_lengths) - response_lengths
    prompt_lengths = logit_index[first_row] - starts + 1
    repeats = same_as_before(tokens, starts, prompt_lengths)
    if micro.images is not None:
        # Prompts with equal tokens may contain different images.
        repeats &= same_as_before(micro.images.feature_of_token.numpy(), starts, prompt_lengths)
    if not repeats.any():
        return None

    leaders = np.flatnonzero(~repeats)
    prompt_of = np.cumsum(~repeats) - 1
    lengths_of_prompts = prompt_lengths[leaders]
    fed = response_lengths - 1
    fed_starts = int(lengths_of_prompts.sum()) + np.cumsum(fed) - fed
    prompt_starts = np.cumsum(lengths_of_prompts) - lengths_of_prompts
    source = np.concatenate(
        [ragged_positions(starts[leaders], lengths_of_prompts), ragged_positions(starts + prompt_lengths, fed)]
    )
    # Row 0 of a response is predicted at its prompt's end, row t at its own token t - 1.
    row = ragged_positions(np.zeros_like(response_lengths), response_lengths)
    at_prompt_end = np.repeat((prompt_starts + lengths_of_prompts - 1)[prompt_of], response_lengths)
    predicted_at = np.where(row == 0, at_prompt_end, np.repeat(fed_starts - 1, response_lengths) + row)

    longer = np.flatnonzero(fed)
    key_starts = np.stack([prompt_starts[prompt_of], fed_starts], axis=1)[longer]
    key_parts = np.stack([prompt_lengths, fed], axis=1)[longer]
    table = SegmentTable(
        query_starts=np.concatenate([prompt_starts, fed_starts[longer]]),
        query_lengths=np.concatenate([lengths_of_prompts, fed[longer]]),
        key_lengths=np.concatenate([lengths_of_prompts, key_parts.sum(axis=1)]),
        key_rows=np.concatenate(
            [
                ragged_positions(prompt_starts, lengths_of_prompts),
                ragged_positions(key_starts.ravel(), key_parts.ravel()),
            ]
        ),
    )
    return SharedStream(source=source, logit_index=predicted_at, table=table)


def select(micro: MicroBatch, stream: SharedStream) -> MicroBatch:
    offsets = np.concatenate([[0], np.cumsum(stream.table.query_lengths)]).astype(np.int32)
    rows = torch.from_numpy(stream.source)
    # index_select: indexing with brackets starts all of torch's threads on the host.
    return replace(
        micro,
        tokens=micro.tokens.index_select(0, rows),
        position_ids=micro.position_ids.index_select(-1, rows),
        cu_seqlens=torch.from_numpy(offsets),
        max_seqlen=int(stream.table.query_lengths.max()),
        logit_index=torch.from_numpy(stream.logit_index),
        images=None
        if micro.images is None
        else replace(micro.images, feature_of_token=micro.images.feature_of_token.index_select(0, rows)),
    )


def same_as_before(tokens: Int64, starts: Int64, lengths: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(S,) whether tokens[starts[i]:][:lengths[i]] equals that of i - 1."""
    alike = np.zeros(len(starts), np.bool_)
    alike[1:] = lengths[1:] == lengths[:-1]
    pairs = np.flatnonzero(alike)
    compared = lengths[pairs]
    differs = tokens[ragged_positions(starts[pairs], compared)] != tokens[ragged_positions(starts[pairs - 1], compared)]
    alike[np.repeat(pairs, compared)[differs]] = False
    return alike
