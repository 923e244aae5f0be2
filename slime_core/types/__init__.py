"""The nouns on the data path: prompts become samples, groups of samples a batch, a batch micro-batches and reports."""

from slime_core.types.batch import Batch, TokenColumns
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_core.types.image import Image
from slime_core.types.prompt import Message, Prompt
from slime_core.types.report import EvalReport, StepReport, TrainReport, WeightUpdateReport
from slime_core.types.sample import Sample, SampleGroup, SpanReward, Status, VersionSpan
from slime_core.types.weights import Bucket

__all__ = [
    "Batch",
    "Bucket",
    "Completion",
    "EvalReport",
    "FinishReason",
    "GenerateRequest",
    "Image",
    "Message",
    "Prompt",
    "Sample",
    "SampleGroup",
    "SamplingParams",
    "SpanReward",
    "Status",
    "StepReport",
    "TokenColumns",
    "TrainReport",
    "VersionSpan",
    "WeightUpdateReport",
]
