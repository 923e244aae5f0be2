"""TrainingData: the data of a forward_backward request, checked, as datums of slime.

Position i of a datum's N input tokens predicts target_tokens[i]. Where all targets are the next tokens, the datum is one text
of N + 1 tokens. A target that is not the next token is allowed where it does not count (programs put 0 there, in the prompt);
its log-prob is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from slime_core.types.batch import Bool, Float32, Int32, Int64
from slime_session import Datum
from slime_tinker.errors import RequestError
from slime_tinker.loss_calls import DocumentedLoss, documented, table_of

Array: TypeAlias = npt.NDArray[Any]

DTYPES: Final[dict[Any, np.dtype[Any]]] = {pb.DTYPE_FLOAT32: np.dtype(np.float32), pb.DTYPE_INT64: np.dtype(np.int64)}
INPUTS: Final = frozenset(
    {
        "target_tokens",
        "weights",
        "advantages",
        "logprobs",
        "sequence_ratio_mask",
        "clip_low_threshold",
        "clip_high_threshold",
    }
)
PER_TOKEN_OPTIONS: Final = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingData:
    datums: tuple[Datum, ...]
    loss: Mapping[str, Any]
    """Name and options of a loss in `slime.losses`."""
    lengths: tuple[int, ...]
    """N of each datum."""
    natural: tuple[Bool, ...]
    """(R,) for each response token whether it is the target there."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def by_position(self, values: npt.NDArray[np.floating]) -> list[Float32]:
        """(M,) values of all response tokens, as (N,) for each datum; 0 where there is none, or its target is another."""
        found, start = [], 0
        for length, natural in zip(self.lengths, self.natural, strict=True):
            column = np.zeros(length, np.float32)
            own = values[start : start + len(natural)]
            column[length - len(natural) :] = np.where(natural, own, 0.0)
            found.append(column)
            start += len(natural)
        return found


def training_data(request: pb.ForwardBackwardRequest, *, vocab_size: int, max_length: int) -> TrainingData:
    """RequestError for the first thing that is wrong, which it names."""
    config = {
        key: value.number if value.WhichOneof("value") == "number" else value.text
        for key, value in request.loss_fn_config_v2.items()
    } or dict(request.loss_fn_config)
    if not request.data:
        raise RequestError("data: empty; send one datum or more.")
    columns = [Columns.of(datum, f"data[{place}]") for place, datum in enumerate(request.data)]
    loss = documented(request.loss_fn)
    config |= per_token_options(loss, columns)
    table = table_of(request.loss_fn, config)
    found = [datum_of(column, loss, request.loss_fn, vocab_size, max_length) for column in columns]
    return TrainingData(
        datums=tuple(datum for datum, _ in found),
        loss=table,
        lengths=tuple(len(column.tokens) for column in columns),
        natural=tuple(natural for _, natural in found),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """One datum as sent."""

    where: str
    tokens: Int32
    """(N,)"""
    inputs: Mapping[str, Array]
    """loss_fn_inputs, dense."""

    @classmethod
    def of(cls, datum: pb.Datum, where: str) -> Columns:
        tokens = tokens_of(datum.model_input, f"{where}.model_input")
        inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            field = f'{where}.loss_fn_inputs["{name}"]'
            if name not in INPUTS:
                raise RequestError(f"{field}: unknown. There are {', '.join(sorted(INPUTS))}.")
            inputs[name] = dense(tensor, field)
        return cls(where=where, tokens=tokens, inputs=inputs)

    def column(self, name: str, read_by: str) -> Array:
        """(N,)"""
        field = f'{self.where}.loss_fn_inputs["{name}"]'
        if name not in self.inputs:
            raise RequestError(f"{field}: missing, and {read_by} reads it.")
        values = self.inputs[name]
        if values.ndim == 2 and values.shape[1] == 1:
            # A single target at each position may come as a matrix of one column.
            values = values[:, 0]
        if values.ndim == 2:
            raise RequestError(
                f"{field}: shape {values.shape}: several targets at one position are not served here; send one."
            )
        if values.shape != self.tokens.shape:
            raise RequestError(f"{field}: {values.size} values, and model_input has {len(self.tokens)} tokens.")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise RequestError(f"{field}[{int(np.flatnonzero(~np.isfinite(values))[0])}] is not finite.")
        return values


def tokens_of(chunks: Sequence[Any], where: str) -> Int32:
    """(N,) of the chunks of a model input. RequestError for chunks that are no tokens."""
    parts = []
    for place, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{where}.chunks[{place}]: {kind}: this server takes token ids (EncodedTextChunk) only.")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise RequestError(f"{where}: no tokens.")
    return tokens


def require_vocabulary(tokens: npt.NDArray[np.integer], vocab_size: int, where: str) -> None:
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise RequestError(f"{where}[{place}] = {int(tokens[place])}: outside the vocabulary of {vocab_size}.")


def dense(tensor: pb.Tensor, where: str) -> Array:
    if tensor.dtype not in DTYPES:
        raise RequestError(f"{where}: dtype {tensor.dtype}: must be float32 or int64.")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = np.frombuffer(tensor.dense, dtype)
        if shape and int(np.prod(shape)) != values.size:
            raise RequestError(f"{where}: {values.size} values for the shape {shape}.")
        flat: Array = values.reshape(shape) if shape else values
        return flat
    csr = tensor.sparse_csr
    rows = np.frombuffer(csr.crow_indices, np.int64)
    places, values = np.frombuffer(csr.col_indices, np.int64), np.frombuffer(csr.values, dtype)
    sound = len(shape) == 2 and len(rows) == shape[0] + 1 and len(places) == len(values)
    if not sound or rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise RequestError(f"{where}: indices that fit no sparse tensor of shape {shape}.")
    if len(places) and not (places.min() >= 0 and places.max() < shape[1]):
        raise RequestError(f"{where}: column indices outside [0, {shape[1]}).")
    full: Array = np.zeros(shape, dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(rows)), places] = values
    return full


def per_token_options(loss: DocumentedLoss, columns: Sequence[Columns]) -> dict[str, float]:
    """Thresholds that were sent with the datums. RequestError unless they are the same everywhere."""
    found: dict[str, float] = {}
    for name in PER_TOKEN_OPTIONS:
        given = [column for column in columns if name in column.inputs]
        if not given or name not in loss.options:
            continue
        first = float(given[0].column(name, "")[0])
        for column in columns:
            if name not in column.inputs or (column.inputs[name] != np.float32(first)).any():
                raise RequestError(
                    f'{column.where}.loss_fn_inputs["{name}"]: thresholds that differ between tokens are not served here. Send '
                    "one in loss_fn_config."
                )
        # The float32 nearest to 0.2 is another number than the float64 of a config.
        found[name] = float(np.format_float_positional(np.float32(first), unique=True))
    return found


def datum_of(columns: Columns, loss: DocumentedLoss, name: str, vocab_size: int, max_length: int) -> tuple[Datum, Bool]:
    """The datum, and which of its response tokens are the targets."""
    where, tokens = columns.where, columns.tokens
    if len(tokens) + 1 > max_length:
        raise RequestError(
            f"{where}.model_input: {len(tokens)} tokens and a target; this server takes {max_length} in all."
        )
    targets: Int64 = columns.column("target_tokens", name)
    field = f'{where}.loss_fn_inputs["target_tokens"]'
    if targets.dtype.kind != "i":
        raise RequestError(f"{field}: dtype {targets.dtype}: must be int64.")
    require_vocabulary(tokens, vocab_size, f"{where}.model_input")
    require_vocabulary(targets, vocab_size, field)
    text = np.append(tokens, np.int32(targets[-1]))
    natural: Bool = text[1:] == targets
    counts, datum = counted(columns, loss, name, text, natural)
    if (stray := np.flatnonzero(counts & ~natural)).size:
        place = int(stray[0])
        raise RequestError(
            f"{field}[{place}] is {int(targets[place])}, and the next token of model_input is {int(text[place + 1])}: a target "
            f"that counts in {name} must be the next token."
        )
    return datum, natural[datum.prompt_length - 1 :]


def counted(columns: Columns, loss: DocumentedLoss, name: str, text: Int32, natural: Bool) -> tuple[Bool, Datum]:
    """(N,) which positions count in the loss, and the datum."""
    start = int(np.argmax(natural))
    own = slice(start, None)
    if not loss.policy:
        ones = np.ones(len(natural), np.float32)
        weights = columns.column("weights", name) if "weights" in columns.inputs else ones
        datum = Datum(
            tokens=text,
            prompt_length=start + 1,
            mask=natural[own].astype(np.uint8),
            loss_weights=np.where(natural, weights, 0.0)[own].astype(np.float32),
        )
        return weights != 0, datum
    advantages, old = columns.column("advantages", name), columns.column("logprobs", name)
    mask = natural
    if loss.masked:
        mask = columns.column("sequence_ratio_mask", name) != 0
        if (outside := np.flatnonzero(~mask & (advantages != 0))).size:
            raise RequestError(
                f'{columns.where}.loss_fn_inputs["advantages"][{int(outside[0])}] is not 0 where sequence_ratio_mask is: '
                "advantages outside the mask are not served here."
            )
    counts = mask | (advantages != 0) if loss.masked or not loss.zero_without_advantage else advantages != 0
    if not loss.zero_without_advantage:
        counts = np.ones_like(natural)
    datum = Datum(
        tokens=text,
        prompt_length=start + 1,
        advantages=advantages[own].astype(np.float32),
        mask=(mask & natural)[own].astype(np.uint8),
        log_probs=old[own].astype(np.float32),
        loss_weights=(mask & natural)[own].astype(np.float32),
    )
    return counts, datum
