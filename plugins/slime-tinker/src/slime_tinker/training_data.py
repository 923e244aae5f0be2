"""TrainingData: the data of a forward_backward request, checked, as datums of slime.

Position i of a datum's N input tokens predicts target_tokens[i]. Where all targets are the next tokens, the datum is one text
of N + 1 tokens. A target that is not the next token is allowed where it does not count (programs put 0 there, in the prompt);
its log-prob is not computed. In cross_entropy any K tokens may be targets at a position: where target_tokens is (N, K), or not
the next tokens, all datums of the request are texts of N tokens with targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from slime_core.types.batch import Bool, Float32, Int32, Int64
from slime_session import Datum
from slime_tinker.errors import RequestError
from slime_tinker.loss_calls import Config, DocumentedLoss, documented, table_of

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

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
MAX_TARGETS: Final = 128
"""At a position."""
MAX_THRESHOLDS: Final = 16
"""Different pairs of thresholds in a request, each of which is a forward_backward of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Datums whose tokens that count have the same options of the loss. Gradients of all parts add up."""

    loss: Mapping[str, Any]
    """Name and options of a loss in `slime.losses`."""
    datums: tuple[Datum, ...]
    places: tuple[int, ...]
    """Of the datums in the request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingData:
    parts: tuple[Part, ...]
    """The first has all datums."""
    shapes: tuple[Shape, ...]
    """Of target_tokens in each datum: (N,) or (N, K)."""
    natural: tuple[Bool, ...]
    """(R,) for each response token whether it is the target there."""

    @property
    def datums(self) -> tuple[Datum, ...]:
        return self.parts[0].datums

    @property
    def num_tokens(self) -> int:
        """Each target is one."""
        return sum(map(math.prod, self.shapes))

    def rows(self, part: Part) -> Int64:
        """Which of the response tokens of all datums are the part's."""
        ends = np.cumsum([0, *(len(natural) for natural in self.natural)])
        return np.concatenate([np.arange(ends[place], ends[place + 1]) for place in part.places])

    def by_position(self, values: npt.NDArray[np.floating]) -> list[Float32]:
        """(M,) values of all response tokens, as target_tokens is for each datum; 0 where there is none, or its target is
        another."""
        found, start = [], 0
        for shape, natural in zip(self.shapes, self.natural, strict=True):
            column = np.zeros(math.prod(shape), np.float32)
            own = values[start : start + len(natural)]
            column[len(column) - len(natural) :] = np.where(natural, own, 0.0)
            found.append(column.reshape(shape))
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
    table = table_of(request.loss_fn, config)
    for column in columns:
        require_input(column, request.loss_fn, vocab_size, max_length)
    if not loss.policy and any(column.has_other_targets() for column in columns):
        datums = tuple(target_datum(column) for column in columns)
        return TrainingData(
            parts=(Part(loss=table, datums=datums, places=tuple(range(len(datums)))),),
            shapes=tuple(column.inputs["target_tokens"].shape for column in columns),
            natural=tuple(np.ones(datum.response_length, np.bool_) for datum in datums),
        )
    found = [datum_of(column, loss, request.loss_fn) for column in columns]
    return TrainingData(
        parts=parts_of(request.loss_fn, {**loss.options, **config}, columns, [datum for datum, _ in found]),
        shapes=tuple(column.inputs["target_tokens"].shape for column in columns),
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
                f"{field}: shape {values.shape}: {read_by} has one target at a position. Send one, or use cross_entropy."
            )
        if values.shape != self.tokens.shape:
            raise RequestError(f"{field}: {values.size} values, and model_input has {len(self.tokens)} tokens.")
        require_finite(values, field)
        return values

    def matrix(self, name: str) -> Array:
        """(N, K) of target_tokens, or of weights, which are 1 where they are missing."""
        field = f'{self.where}.loss_fn_inputs["{name}"]'
        targets = self.inputs["target_tokens"]
        values = self.inputs.get(name, np.ones(targets.shape, np.float32))
        shaped = values.ndim in (1, 2) and len(values) == len(self.tokens)
        if not shaped or (name != "target_tokens" and values.size != targets.size):
            raise RequestError(
                f"{field}: shape {values.shape}, and model_input has {len(self.tokens)} tokens with target_tokens of shape "
                f"{targets.shape}: must be (N,) or (N, K), the same for both."
            )
        if not 1 <= values.size // len(self.tokens) <= MAX_TARGETS:
            raise RequestError(f"{field}: shape {values.shape}: a position may have from 1 to {MAX_TARGETS} targets.")
        require_finite(values, field)
        return values.reshape(len(self.tokens), -1)

    def has_other_targets(self) -> bool:
        """Whether some that count are not the next token. Of cross_entropy."""
        targets, weights = self.matrix("target_tokens"), self.matrix("weights")
        following = np.append(self.tokens[1:], targets[-1, :1])
        return targets.shape[1] > 1 or bool(((targets != following[:, None]) & (weights != 0)).any())


def tokens_of(chunks: Sequence[Any], where: str) -> Int32:
    """(N,) of the chunks of a model input. RequestError for chunks that are no tokens."""
    parts = []
    for place, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise RequestError(f"{where}.chunks[{place}]: {kind}: this server takes token ids (EncodedTextChunk) only.")
        parts.append(numbers(chunk.encoded_text.tokens, np.int32, f"{where}.chunks[{place}]"))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise RequestError(f"{where}: no tokens.")
    return tokens


def require_vocabulary(tokens: npt.NDArray[np.integer], vocab_size: int, where: str) -> None:
    outside = np.argwhere((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        place = tuple(outside[0].tolist())
        shown = ", ".join(map(str, place))
        raise RequestError(f"{where}[{shown}] = {int(tokens[place])}: outside the vocabulary of {vocab_size}.")


def require_finite(values: Array, where: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        place = ", ".join(map(str, np.argwhere(~np.isfinite(values))[0].tolist()))
        raise RequestError(f"{where}[{place}] is not finite.")


def numbers(data: bytes, dtype: npt.DTypeLike, where: str) -> Array:
    """A view of the bytes. RequestError if they are no whole number of values."""
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise RequestError(f"{where}: {len(data)} bytes, and a value has {size}.")
    return np.frombuffer(data, dtype)


def dense(tensor: pb.Tensor, where: str) -> Array:
    if tensor.dtype not in DTYPES:
        raise RequestError(f"{where}: dtype {tensor.dtype}: must be float32 or int64.")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise RequestError(f"{where}: shape {shape}: a size is below 0.")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = numbers(tensor.dense, dtype, where)
        if shape and math.prod(shape) != values.size:
            raise RequestError(f"{where}: {values.size} values for the shape {shape}.")
        flat: Array = values.reshape(shape) if shape else values
        return flat
    csr = tensor.sparse_csr
    rows = numbers(csr.crow_indices, np.int64, f"{where}: crow_indices")
    places = numbers(csr.col_indices, np.int64, f"{where}: col_indices")
    values = numbers(csr.values, dtype, f"{where}: values")
    sound = len(shape) == 2 and len(rows) == shape[0] + 1 and len(places) == len(values)
    if not sound or rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise RequestError(f"{where}: indices that fit no sparse tensor of shape {shape}.")
    if len(places) and not (places.min() >= 0 and places.max() < shape[1]):
        raise RequestError(f"{where}: column indices outside [0, {shape[1]}).")
    if shape[1] > MAX_TARGETS:
        raise RequestError(f"{where}: shape {shape}: a position may have from 1 to {MAX_TARGETS} targets.")
    full: Array = np.zeros(shape, dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(rows)), places] = values
    return full


def parts_of(name: str, config: Config, columns: Sequence[Columns], datums: Sequence[Datum]) -> tuple[Part, ...]:
    """One for each pair of thresholds that a token which counts has. RequestError for too many. config: with all options."""
    sent = [key for key in PER_TOKEN_OPTIONS if key in config and any(key in column.inputs for column in columns)]
    every = tuple(range(len(datums)))
    if not sent:
        return (Part(loss=table_of(name, config), datums=tuple(datums), places=every),)
    options = np.concatenate(
        [thresholds_of(column, datum, config) for column, datum in zip(columns, datums, strict=True)]
    )
    weights = np.concatenate([np.asarray(datum.loss_weights) for datum in datums])
    pairs, pair = np.unique(options, axis=0, return_inverse=True)
    used = np.unique(pair[weights != 0]) if (weights != 0).any() else pair[:1]
    if len(used) > MAX_THRESHOLDS:
        raise RequestError(
            f"clip_low_threshold and clip_high_threshold: {len(used)} different pairs in the datums, and a request may have "
            f"{MAX_THRESHOLDS}. Send it in parts: gradients add up until optim_step."
        )
    ends = np.cumsum([0, *(datum.response_length for datum in datums)])
    found: list[Part] = []
    for number in used:
        own = np.where(pair.reshape(-1) == number, weights, 0.0).astype(np.float32)
        of_datum = [own[start:end] for start, end in pairwise(ends)]
        places = every if not found else tuple(place for place in every if of_datum[place].any())
        table = table_of(name, {**config, **dict(zip(PER_TOKEN_OPTIONS, map(nearest, pairs[number]), strict=True))})
        chosen = tuple(replace(datums[place], loss_weights=of_datum[place]) for place in places)
        found.append(Part(loss=table, datums=chosen, places=places))
    return tuple(found)


def thresholds_of(columns: Columns, datum: Datum, config: Config) -> Array:
    """(R, 2) of the response tokens: sent with the datum, or those of the request."""
    length = datum.response_length
    given = [
        columns.column(key, "")[-length:] if key in columns.inputs else np.full(length, config[key])
        for key in PER_TOKEN_OPTIONS
    ]
    return np.stack(given, axis=1).astype(np.float32)


def nearest(value: np.float32) -> float:
    """The shortest decimal of a float32: the nearest one to 0.2 is another number than the float64 of a config."""
    return float(np.format_float_positional(value, unique=True))


def require_input(columns: Columns, name: str, vocab_size: int, max_length: int) -> None:
    """RequestError for tokens or targets that the model cannot take."""
    where, tokens = columns.where, columns.tokens
    if len(tokens) + 1 > max_length:
        raise RequestError(
            f"{where}.model_input: {len(tokens)} tokens and a target; this server takes {max_length} in all."
        )
    field = f'{where}.loss_fn_inputs["target_tokens"]'
    if "target_tokens" not in columns.inputs:
        raise RequestError(f"{field}: missing, and {name} reads it.")
    targets = columns.inputs["target_tokens"]
    if targets.dtype.kind != "i":
        raise RequestError(f"{field}: dtype {targets.dtype}: must be int64.")
    require_vocabulary(tokens, vocab_size, f"{where}.model_input")
    require_vocabulary(targets, vocab_size, field)


def target_datum(columns: Columns) -> Datum:
    """Of cross_entropy, with any targets."""
    targets = columns.matrix("target_tokens")
    return Datum(
        tokens=columns.tokens,
        prompt_length=len(columns.tokens),
        targets=targets,
        mask=np.ones(targets.size, np.uint8),
        loss_weights=columns.matrix("weights").ravel().astype(np.float32),
    )


def datum_of(columns: Columns, loss: DocumentedLoss, name: str) -> tuple[Datum, Bool]:
    """The datum, and which of its response tokens are the targets."""
    tokens = columns.tokens
    targets: Int64 = columns.column("target_tokens", name)
    field = f'{columns.where}.loss_fn_inputs["target_tokens"]'
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
