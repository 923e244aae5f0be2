"""The decoder: which sequences run, and one step of them all.

A step feeds the last token of every running row, computes the prompts of newly admitted ones, and samples the next
token of both together. Nothing here awaits: between two steps the state is whole, so that requests, aborts and new
weights may come at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, starmap

import numpy as np
import torch
from torch import Tensor

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason, SamplingParams
from slime_local.admission import Admission
from slime_local.image_inputs import ImageInputs, prefill_logits
from slime_local.kv_cache import DecodeView, KVCache, PrefillView
from slime_local.model import RolloutModel
from slime_local.random_draws import stream_keys
from slime_local.request_row import RequestRow
from slime_local.running_batch import DELAY_END, DELTA, END, STOP_SET, RunningBatch
from slime_local.sampler import Special, sample
from slime_local.stop_table import StopTable
from slime_local.stop_text import StopText
from slime_local.threads import PartThreads

_CPU_ROWS = 1024
"""Rows that a forward pass on a CPU may always have."""
_CPU_CELLS = 2**17
"""Numbers of a layer's input in a pass on a CPU, where that is more than `_CPU_ROWS` rows. Beyond it activations outgrow the
caches and what the allocator keeps, and a pass costs more per token (with 768 rows of 384 float32 and glibc's own thresholds
already 4 us more). Below it most is what a pass costs whatever its rows: 3,072 rows of 64 take 12 ms in two, 15 in four."""
_CPU_HALVED = 512
"""Rows from which a step on a CPU has an even number of passes, for threads to share."""


class Decoder:
    def __init__(
        self,
        model: RolloutModel,
        stop_text: StopText,
        *,
        engine_index: int,
        admission: Admission,
        threads: PartThreads,
    ) -> None:
        self._model = model
        self._threads = threads
        self._stop_text = stop_text
        self._engine_index = engine_index
        self._admission = admission
        self._rows: list[RequestRow] = []
        self.request_ids: set[str] = set()
        """Ids of all requests that run or wait."""
        self._version = -1
        self._recomputing = False
        self._special = Special()
        self.release()

    @property
    def busy(self) -> bool:
        return bool(self._admission.waiting or self._rows)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of its running sequences at their longest."""
        longest = max((row.longest for row in self._rows), default=0)
        return len(self._rows) * longest * self._slots.store.token_bytes

    def release(self) -> None:
        """Gives keys, values and all row buffers back."""
        if self.busy:
            waiting = len(self._admission.waiting)
            raise EngineError(
                f"engine {self._engine_index}: sleep while {len(self._rows)} requests run and {waiting} wait; "
                "abort them first."
            )
        dtype, device = self._model.network.dtype, self._model.device
        store = KVCache(self._model.layers, dtype, device)
        self._slots = RunningBatch(store, dtype, device, self._admission.most_cells(store.token_bytes))
        self._stop_table = StopTable(self._model.stop_ids, self._model.vocab_size, device)

    def submit(self, rows: Sequence[RequestRow]) -> None:
        """They run in this order, after what waits already. Those with no room for a token are served at once."""
        for row in rows:
            if row.limit > 0:
                self._admission.waiting.append(row)
                self.request_ids.add(row.request.request_id)
            else:
                row.respond(np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.LENGTH, self._engine_index)

    @torch.inference_mode()
    def activate(self, version: int) -> None:
        """Later tokens are of `version`. Rows keep their tokens; their keys and values are computed anew before the
        next step, so that they continue exactly as if these weights had read everything so far."""
        self._version = version
        # Those of weights that had diverged are NaN, also in masked columns, and would reach rows that come into their places.
        self._slots.store.clear()
        self._recomputing = bool(self._rows)
        for row in self._rows:
            row.stale = True
            row.close_span(self._slots.end, version)

    @torch.inference_mode()
    def step(self) -> None:
        """One decode step, or one part of the recomputation after new weights."""
        if self._recomputing:
            stale = [index for index, row in enumerate(self._rows) if row.stale]
            self._recomputing = bool(stale)
            if stale:
                self._recompute(stale)
                return
        logits = [self._decode()] if self._rows else []
        if self._admission.may_admit(self._rows, self._slots.store.token_bytes):
            logits.append(self._admit())
        self._sample(torch.cat(logits) if len(logits) > 1 else logits[0])

    # ---------------------------------------------------------------- forward passes

    def _decode(self) -> Tensor:
        slots = self._slots
        slots.reserve(0, 0)
        n = slots.count
        parts = 1 if slots.device.type != "cpu" else passes(n, self._model.hidden_size)
        edges = [n * part // parts for part in range(parts + 1)]
        logits = self._threads.map(self._decode_rows, list(starmap(slice, pairwise(edges))))
        return torch.cat(logits) if parts > 1 else logits[0]

    def _decode_rows(self, rows: slice) -> Tensor:
        slots = self._slots
        cache = DecodeView(slots.store, rows, slots.at(slots.first), slots.at(slots.end) - 1)
        positions = (slots.end - 1 - slots.start()[rows] + slots.integer(DELTA)[rows])[:, None]
        return self._model.logits(slots.last_tokens()[rows], positions, slots.bias()[rows], cache)

    def _prefill(
        self, ids: Tensor, lengths: Tensor, view: PrefillView, pictures: Sequence[ImageInputs | None]
    ) -> Tensor:
        """`ids` (B, P) padded on the left, `lengths` (B,); returns the logits of the last column, (B, V)."""
        p = ids.shape[1]
        column = torch.arange(p, device=ids.device)
        before = p - lengths[:, None]
        mask = None
        if bool((before > 0).any()):
            causal = column[None, :, None] >= column[None, None, :]
            # A padded query sees itself: a row of -inf would be NaN, and NaN survives a weight of 0.
            itself = torch.eye(p, dtype=torch.bool, device=ids.device)
            mask = ((causal & (column >= before)[:, None, :]) | itself)[:, None]
        positions = (column - before).clamp_(min=0)
        if any(picture is not None for picture in pictures):
            return prefill_logits(self._model.network, ids, lengths, positions, mask, view, pictures)
        return self._model.logits(ids, positions, mask, view)

    def _recompute(self, stale: Sequence[int]) -> None:
        slots = self._slots
        end = slots.end - 1
        first = min(self._rows[index].start for index in stale)
        width = end - first
        chosen = stale[: max(1, self._admission.max_prefill_tokens // width)]
        rows = torch.tensor(chosen, device=slots.device)
        starts = slots.start()[rows]
        before = torch.arange(first, end, device=slots.device) < starts[:, None]
        ids = slots.tokens(rows, first, end).masked_fill(before, 0)
        source = torch.arange(len(chosen), device=slots.device)
        view = PrefillView(slots.store, rows, source, slots.at(end))
        self._prefill(ids, end - starts, view, [self._rows[index].pictures for index in chosen])
        for index in chosen:
            self._rows[index].stale = False

    # ---------------------------------------------------------------- admission

    def _admit(self) -> Tensor:
        """Logits of the prompts' last tokens, (new rows, V). Equal prompts are computed once."""
        slots = self._slots
        if not self._rows:
            self._stop_table.clear()
        admitted = self._admission.take(self._rows, slots.store.token_bytes)
        chosen, distinct, source = admitted.rows, admitted.distinct, admitted.source
        widest = max(row.prompt_length for row in chosen)
        prompts = np.zeros((len(distinct), widest), np.int64)
        lengths = np.empty(len(distinct), np.int64)
        for index, row in enumerate(distinct):
            tokens = row.request.token_ids
            lengths[index] = len(tokens)
            prompts[index, widest - len(tokens) :] = tokens

        count = len(self._rows)
        slots.reserve(len(chosen), widest)
        for row in chosen:
            row.start = slots.end - row.prompt_length
            row.version, row.span_start = self._version, slots.end
        integers = np.array([self._integers(row) for row in chosen], np.int64)
        reals = [_reals(row.request.sampling) for row in chosen]
        slots.add(prompts[source], integers, stream_keys([row.request.seed for row in chosen]), reals)
        self._rows += chosen
        self._special = Special.of({row.request.sampling for row in self._rows})

        which = torch.tensor(source, device=slots.device)
        rows = torch.arange(count, count + len(chosen), device=slots.device)
        view = PrefillView(slots.store, rows, which, slots.at(slots.end))
        logits = self._prefill(
            torch.from_numpy(prompts).to(slots.device),
            torch.from_numpy(lengths).to(slots.device),
            view,
            [row.pictures for row in distinct],
        )
        return logits[which]

    def _integers(self, row: RequestRow) -> list[int]:
        params = row.request.sampling
        top_k = params.top_k if params.top_k > 0 else self._model.vocab_size
        end = row.response_start
        delta = 0 if row.pictures is None else row.pictures.delta
        # START, END, DELAY_END, STOP_SET, TOP_K, KEY, DELTA; KEY is filled in by the slots.
        line = self._stop_table.line_of(params.stop_token_ids)
        return [row.start, end + row.limit, end + params.min_new_tokens, line, top_k, 0, delta]

    # ---------------------------------------------------------------- sampling and finishing

    def _sample(self, logits: Tensor) -> None:
        slots, special = self._slots, self._special
        stop_set = slots.integer(STOP_SET)
        barred = None
        if special.delayed:
            barred = self._stop_table.stop_tokens(stop_set) & (slots.end < slots.integer(DELAY_END))[:, None]
        seen = slots.seen(self._model.vocab_size) if special.penalized else None
        tokens, log_probs = sample(
            logits, slots.draw(), special, seen_NV=seen, barred_NV=barred, log_softmax=self._model.log_softmax
        )
        slots.append(tokens, log_probs)

        # The one transfer to the host per step: 1 = length reached, 2 = stop token.
        stopped = self._stop_table.stops(stop_set, tokens)
        ended = (slots.integer(END) == slots.end).to(torch.uint8) + stopped.to(torch.uint8) * 2
        codes = ended.cpu().numpy()
        reasons = {
            int(index): FinishReason.STOP if codes[index] > 1 else FinishReason.LENGTH
            for index in np.flatnonzero(codes)
        }
        if special.stop_text:
            reasons |= dict.fromkeys(self._stop_text.ended_rows(self._rows, slots), FinishReason.STOP)
        self._finish(reasons)

    def _finish(self, reasons: dict[int, FinishReason]) -> None:
        if not reasons:
            return
        slots = self._slots
        indices = list(reasons)
        first = min(self._rows[index].response_start for index in indices)
        tokens, log_probs = slots.responses(indices, first)
        for place, index in enumerate(indices):
            row = self._rows[index]
            begin = row.response_start - first
            self.request_ids.discard(row.request.request_id)
            row.close_span(slots.end, row.version)
            row.respond(
                tokens[place, begin:].copy(), log_probs[place, begin:].copy(), reasons[index], self._engine_index
            )
        self._remove(indices)

    def _remove(self, indices: Sequence[int]) -> None:
        gone = set(indices)
        starts = [row.start for index, row in enumerate(self._rows) if index not in gone]
        for source, target in self._slots.drop(indices, starts):
            self._rows[target] = self._rows[source]
        del self._rows[self._slots.count :]

    # ---------------------------------------------------------------- ends from outside

    @torch.inference_mode()
    def end(self, chosen: Callable[[RequestRow], bool]) -> None:
        """Ends the chosen requests with the tokens they have and finish reason abort."""
        kept = deque(row for row in self._admission.waiting if not chosen(row))
        for row in self._admission.waiting:
            if chosen(row):
                self.request_ids.discard(row.request.request_id)
                row.respond(np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT, self._engine_index)
        self._admission.waiting = kept
        self._finish({index: FinishReason.ABORT for index, row in enumerate(self._rows) if chosen(row)})

    def fail(self, error: EngineError) -> None:
        """Fails every call that still waits."""
        for row in (*self._rows, *self._admission.waiting):
            row.ticket.fail(error)
        self._admission.waiting.clear()


def passes(rows: int, hidden_size: int) -> int:
    """Forward passes of a decode step on a CPU. Not by the number of threads: results would depend on the machine's."""
    most = max(_CPU_ROWS, _CPU_CELLS // hidden_size)
    return 1 if rows < _CPU_HALVED else 2 * -(-rows // (2 * most))


def _reals(params: SamplingParams) -> list[float]:
    greedy = params.temperature == 0
    return [1.0 if greedy else params.temperature, float(greedy), params.top_p, params.repetition_penalty]
