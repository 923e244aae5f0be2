"""Linear layers in float8 (torchao): e4m3, a scale for each row of an input, a weight and a gradient. The output head,
embeddings and norms stay as they are, and so do the weights that are kept and sent between ranks.

All three products of a layer contract over 16 elements at a time: features, which is a matter of the model, and tokens, for
the gradient of the weight. So streams get a sequence of padding behind their last token, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from slime_core.errors import ModelError
from slime_core.types.microbatch import MicroBatch
from slime_training.segment_table import SegmentTable

MULTIPLE: Final = 16
"""Of elements that a product in float8 contracts over."""


def use_float8(layers: Sequence[nn.Module], *, emulate: bool) -> None:
    """Replaces the linear layers inside `layers`. They keep their parameters. `emulate`: round as float8 does, and compute the
    products in the dtype of the inputs; for the CPU, whose torch has no such products."""
    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    config = replace(recipe, emulate=emulate)
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
                raise ModelError(
                    f"backend.fp8: {name} of a layer has {module.in_features} inputs and {module.out_features} outputs, and "
                    f"float8 requires multiples of {MULTIPLE}. Leave fp8 out."
                )
        convert_to_float8_training(layer, config=config)


def padded(micro: MicroBatch, table: SegmentTable) -> tuple[MicroBatch, SegmentTable]:
    """The stream, (N,) tokens on the CPU, with a last sequence that fills it up to a multiple. `table`: of the same stream."""
    num_tokens = len(micro.tokens)
    more = -num_tokens % MULTIPLE
    if not more:
        return micro, table
    positions = torch.arange(more, dtype=micro.position_ids.dtype)
    wide = replace(
        micro,
        tokens=torch.cat([micro.tokens, micro.tokens[:1].expand(more)]),
        position_ids=torch.cat([micro.position_ids, positions]),
        cu_seqlens=torch.cat([micro.cu_seqlens, micro.cu_seqlens.new_tensor([num_tokens + more])]),
        max_seqlen=max(micro.max_seqlen, more),
    )
    rows = np.arange(num_tokens, num_tokens + more)
    return wide, SegmentTable(
        query_starts=np.append(table.query_starts, num_tokens),
        query_lengths=np.append(table.query_lengths, more),
        key_lengths=np.append(table.key_lengths, more),
        key_rows=None if table.key_rows is None else np.append(table.key_rows, rows),
    )
