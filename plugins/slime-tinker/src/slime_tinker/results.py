"""Results in the SDK's protobuf."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, FinishReason
from slime_tinker.models import PromptScores
from slime_tinker.records import Outcome

OUTPUT_TYPE: Final = "TorchLossReturn"
NO_TOKEN: Final = -99999.0
"""Log-prob of an empty place among the likeliest tokens."""
STOP_REASONS: Final = {FinishReason.STOP: pb.STOP_REASON_STOP, FinishReason.LENGTH: pb.STOP_REASON_LENGTH}


def forward_backward_outcome(outputs: Mapping[str, Sequence[Float32]], metrics: Mapping[str, float]) -> Outcome:
    """`outputs`: for each name (N,) or (N, K) of every datum. `metrics`: names end with how chunks of a request are joined
    (`:sum`)."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    # Neighbours with equal K have a record of their own.
    shapes = [array.shape[1:] for array in next(iter(outputs.values()))]
    for shape, places in itertools.groupby(range(len(shapes)), key=shapes.__getitem__):
        record = message.loss_fn_outputs.add()
        record.type_tag = OUTPUT_TYPE
        chosen = list(places)
        record.num_datums = len(chosen)
        for name, arrays in outputs.items():
            own = [arrays[place] for place in chosen]
            tensor = record.fields[name]
            tensor.dtype = pb.DTYPE_FLOAT32
            tensor.trailing_shape.extend(shape)
            tensor.data = np.concatenate(own).astype(np.float32).tobytes()
            tensor.offsets = np.cumsum([0, *(array.size * 4 for array in own)], dtype=np.int64).tobytes()
    for name, value in metrics.items():
        message.metrics[name] = value
    return Outcome(content=message.SerializeToString(), is_proto=True)


def sample_outcome(
    completions: Sequence[Completion],
    scores: PromptScores | None,
    last_n: int | None,
    likeliest: Sequence[PromptScores] | None = None,
) -> Outcome:
    """`scores`: of the prompt, None: not requested. `last_n`: of its tokens only; None: all. `likeliest`: of each completion's
    tokens; None: not requested."""
    message = pb.SampleResponse()
    for number, completion in enumerate(completions):
        sequence = message.sequences.add(
            stop_reason=STOP_REASONS[completion.finish_reason],
            tokens=completion.token_ids.astype(np.int32).tobytes(),
            logprobs=completion.log_probs.astype(np.float32).tobytes(),
        )
        if likeliest is not None and (ids := likeliest[number].top_ids) is not None:
            top = sequence.topk_sampled_logprobs
            top.length, top.k = ids.shape
            top.token_ids = ids.astype(np.int32).tobytes()
            top.logprobs = np.asarray(likeliest[number].top_log_probs, np.float32).tobytes()
    if scores is not None:
        unscored = 0 if last_n is None else len(scores.log_probs) - last_n
        log_probs = np.full(len(scores.log_probs) + 1, np.nan, np.float32)
        log_probs[1 + unscored :] = scores.log_probs[unscored:]
        message.prompt_logprobs = log_probs.tobytes()
        if scores.top_ids is not None and scores.top_log_probs is not None:
            length, k = len(log_probs), scores.top_ids.shape[1]
            ids, values = np.zeros((length, k), np.int32), np.full((length, k), NO_TOKEN, np.float32)
            ids[1 + unscored :], values[1 + unscored :] = scores.top_ids[unscored:], scores.top_log_probs[unscored:]
            top = message.topk_prompt_logprobs
            top.k, top.length = k, length
            top.token_ids, top.logprobs = ids.tobytes(), values.tobytes()
    return Outcome(content=message.SerializeToString(), is_proto=True)
