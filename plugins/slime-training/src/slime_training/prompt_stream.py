"""prompt_stream: a micro-batch whose response tokens are targets of the prompts' positions (`PromptTargetsBackend`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from slime_core.types.batch import ragged_positions
from slime_core.types.microbatch import MicroBatch


def prompt_stream(micro: MicroBatch) -> MicroBatch:
    """The stream has the prompts alone. The response axis is unchanged; `logit_index` ascends, each position K times."""
    if not micro.num_samples:
        return micro
    offsets = micro.cu_seqlens.numpy().astype(np.int64)
    num_targets = np.bincount(micro.segments.numpy(), minlength=micro.num_samples)
    prompts = np.diff(offsets) - num_targets
    source = torch.from_numpy(ragged_positions(offsets[:-1], prompts))
    repeats = np.repeat(num_targets // prompts, prompts)
    return replace(
        micro,
        tokens=micro.tokens.index_select(0, source),
        position_ids=micro.position_ids.index_select(-1, source),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(prompts)]).astype(np.int32)),
        max_seqlen=int(prompts.max()),
        logit_index=torch.from_numpy(np.repeat(np.arange(len(repeats)), repeats)),
    )
