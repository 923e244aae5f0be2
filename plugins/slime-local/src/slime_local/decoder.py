"""The decoder: which sequences run, and one step of them all.

A step feeds the last token of every running row, computes the prompts of newly admitted ones, and samples the next
token of both together. Nothing here awaits: between two steps the state is whole, so that requests, aborts and new
weights may come at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

import numpy as np
import torch
from torch import Tensor

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason, SamplingParams
from slime_core.types.image import Image
from slime_local.kv_store import DecodeView, KvStore, PrefillView
from slime_local.model import RolloutModel
from slime_local.pictures import Pictures, prefill_logits
from slime_local.random_draws import stream_keys
from slime_local.request_row import RequestRow
from slime_local.sampler import Special, sample
from slime_local.slots import DELAY_END, DELTA, END, STOP_SET, Slots
from slime_local.stop_text import StopText

_REFILL_SHARE = 16
"""Freed rows are refilled when everything that waits fits, or 1/16 of all rows is free: a prefill per finished row
would cost as much as the decode step beside it."""
_CPU_ROWS = 1024
"""Rows per forward pass on a CPU: beyond this the activations of a pass outgrow the caches and what the allocator keeps,
and a pass costs more per token (with 768 rows of 384 float32 and glibc's own thresholds already 4 us more)."""


class Decoder:
    def __init__(
        self,
        model: RolloutModel,
        stop_text: StopText,
        *,
        engine_index: int,
        max_running: int,
        max_prefill_tokens: int,
        kv_cache_bytes: int,
    ) -> None:
        self._model = model
        self._stop_text = stop_text
        self._engine_index = engine_index
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._kv_cache_bytes = kv_cache_bytes
        self._waiting: deque[RequestRow] = deque()
        self._rows: list[RequestRow] = []
        self.request_ids: set[str] = set()
        """Of everything that runs or waits."""
        self._version = -1
        self._recomputing = False
        self._special = Special()
        self.release()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    def release(self) -> None:
        """Gives keys, values and all row buffers back."""
        if self.busy:
            raise EngineError(
                f"engine {self._engine_index}: sleep while {len(self._rows)} requests run and {len(self._waiting)} wait; "
                "abort them first."
            )
        dtype, device = self._model.network.dtype, self._model.device
        self._slots = Slots(KvStore(self._model.layers, dtype, device), dtype, device)
        self._stop_sets: dict[frozenset[int], int] = {}
        self._stop_table = torch.zeros((0, self._model.vocab_size), dtype=torch.bool, device=device)

    def submit(self, rows: Sequence[RequestRow]) -> None:
        """They run in this order, after what waits already. Those with no room for a token are answered at once."""
        for row in rows:
            if row.limit > 0:
                self._waiting.append(row)
                self.request_ids.add(row.request.request_id)
            else:
                row.answer(np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.LENGTH, self._engine_index)

    def activate(self, version: int) -> None:
        """Later tokens are of `version`. Rows keep their tokens; their keys and values are computed anew before the
        next step, so that they go on exactly as if these weights had read everything so far."""
        self._version = version
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
        if self._may_admit():
            logits.append(self._admit())
        self._sample(torch.cat(logits) if len(logits) > 1 else logits[0])

    # ---------------------------------------------------------------- forward passes

    def _decode(self) -> Tensor:
        slots = self._slots
        slots.reserve(0, 0)
        n = slots.count
        parts = 1 if slots.device.type != "cpu" else -(-n // _CPU_ROWS)
        edges = [n * part // parts for part in range(parts + 1)]
        logits = [self._decode_rows(slice(begin, end)) for begin, end in pairwise(edges)]
        return torch.cat(logits) if parts > 1 else logits[0]

    def _decode_rows(self, rows: slice) -> Tensor:
        slots = self._slots
        cache = DecodeView(slots.store, rows, slots.at(slots.first), slots.at(slots.end) - 1)
        positions = (slots.end - 1 - slots.start()[rows] + slots.integer(DELTA)[rows])[:, None]
        return self._model.logits(slots.last_tokens()[rows], positions, slots.bias()[rows], cache)

    def _prefill(self, ids: Tensor, lengths: Tensor, view: PrefillView, pictures: Sequence[Pictures | None]) -> Tensor:
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
        chosen = stale[: max(1, self._max_prefill_tokens // width)]
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

    def _may_admit(self) -> bool:
        free = self._max_running - len(self._rows)
        enough = len(self._waiting) <= free or free * _REFILL_SHARE >= self._max_running
        return bool(self._waiting) and (not self._rows or (free > 0 and enough and self._fits(self._waiting[0])))

    def _fits(self, row: RequestRow) -> bool:
        longest = max(other.longest for other in (*self._rows, row))
        return (len(self._rows) + 1) * longest * self._slots.store.token_bytes <= self._kv_cache_bytes

    def _choose(self) -> tuple[list[RequestRow], list[RequestRow], list[int]]:
        """Rows from the head of the queue, the first with each distinct prompt, and which row has which."""
        token_bytes = self._slots.store.token_bytes
        longest = max((row.longest for row in self._rows), default=0)
        widest = 0
        chosen: list[RequestRow] = []
        distinct: dict[tuple[bytes, tuple[Image, ...]], int] = {}
        first: list[RequestRow] = []
        source: list[int] = []
        for row in islice(self._waiting, self._max_running - len(self._rows)):
            prompt = (np.asarray(row.request.token_ids, np.int32).tobytes(), row.request.images)
            longest = max(longest, row.longest)
            widest = max(widest, row.prompt_length)
            prompts = len(distinct) + (prompt not in distinct)
            memory = (len(self._rows) + len(chosen) + 1) * longest * token_bytes
            if chosen and (prompts * widest > self._max_prefill_tokens or memory > self._kv_cache_bytes):
                break
            row.shared_tokens = row.prompt_length if prompt in distinct else 0
            if prompt not in distinct:
                first.append(row)
            source.append(distinct.setdefault(prompt, len(distinct)))
            chosen.append(row)
        return chosen, first, source

    def _admit(self) -> Tensor:
        """Logits of the prompts' last tokens, (new rows, V). Equal prompts are computed once."""
        slots = self._slots
        if not self._rows:
            self._stop_sets.clear()
        chosen, distinct, source = self._choose()
        for _ in chosen:
            self._waiting.popleft()
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
        end = row.answer_start
        delta = 0 if row.pictures is None else row.pictures.delta
        # START, END, DELAY_END, STOP_SET, TOP_K, KEY, DELTA; KEY is filled in by the slots.
        return [row.start, end + row.limit, end + params.min_new_tokens, self._stop_set(params), top_k, 0, delta]

    def _stop_set(self, params: SamplingParams) -> int:
        """The row of the stop table with the model's stop tokens and this request's."""
        ids = self._model.stop_ids.union(params.stop_token_ids)
        known = self._stop_sets.get(ids)
        if known is not None:
            return known
        row = torch.zeros((1, self._model.vocab_size), dtype=torch.bool, device=self._slots.device)
        row[0, list(ids)] = True
        self._stop_table = torch.cat([self._stop_table[: len(self._stop_sets)], row])
        return self._stop_sets.setdefault(ids, len(self._stop_sets))

    # ---------------------------------------------------------------- sampling and finishing

    def _sample(self, logits: Tensor) -> None:
        slots, special = self._slots, self._special
        stop_set = slots.integer(STOP_SET)
        barred = None
        if special.delayed:
            barred = self._stop_table[stop_set] & (slots.end < slots.integer(DELAY_END))[:, None]
        seen = slots.seen(self._model.vocab_size) if special.penalised else None
        tokens, log_probs = sample(
            logits, slots.draw(), special, seen_NV=seen, barred_NV=barred, log_softmax=self._model.log_softmax
        )
        slots.append(tokens, log_probs)

        # The one transfer to the host per step: 1 = length reached, 2 = stop token.
        stopped = self._stop_table.view(-1)[stop_set * self._model.vocab_size + tokens]
        ended = (slots.integer(END) == slots.end).to(torch.uint8) + stopped.to(torch.uint8) * 2
        codes = ended.cpu().numpy()
        reasons = {
            int(index): FinishReason.STOP if codes[index] > 1 else FinishReason.LENGTH
            for index in np.flatnonzero(codes)
        }
        for index in self._stopped_by_text():
            reasons[index] = FinishReason.STOP
        self._finish(reasons)

    def _stopped_by_text(self) -> list[int]:
        slots = self._slots
        if not self._special.stop_text:
            return []
        asking = [
            index
            for index, row in enumerate(self._rows)
            if row.request.sampling.stop and slots.end - row.answer_start >= max(1, row.request.sampling.min_new_tokens)
        ]
        if not asking:
            return []
        tails = [
            min(self._stop_text.tail_length(self._rows[i].request.sampling), slots.end - self._rows[i].answer_start)
            for i in asking
        ]
        first = slots.end - max(tails)
        tokens = slots.tokens(torch.tensor(asking, device=slots.device), first, slots.end).cpu().numpy()
        return [
            index
            for index, row_tokens, tail in zip(asking, tokens, tails, strict=True)
            if self._stop_text.found(row_tokens[-tail:], self._rows[index].request.sampling)
        ]

    def _finish(self, reasons: dict[int, FinishReason]) -> None:
        if not reasons:
            return
        slots = self._slots
        indices = list(reasons)
        first = min(self._rows[index].answer_start for index in indices)
        tokens, log_probs = slots.answers(indices, first)
        for place, index in enumerate(indices):
            row = self._rows[index]
            begin = row.answer_start - first
            self.request_ids.discard(row.request.request_id)
            row.close_span(slots.end, row.version)
            row.answer(
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
        kept = deque(row for row in self._waiting if not chosen(row))
        for row in self._waiting:
            if chosen(row):
                self.request_ids.discard(row.request.request_id)
                row.answer(np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT, self._engine_index)
        self._waiting = kept
        self._finish({index: FinishReason.ABORT for index, row in enumerate(self._rows) if chosen(row)})

    def fail(self, error: EngineError) -> None:
        """Fails every call that still waits."""
        for row in (*self._rows, *self._waiting):
            row.ticket.fail(error)
        self._waiting.clear()


def _reals(params: SamplingParams) -> list[float]:
    greedy = params.temperature == 0
    return [1.0 if greedy else params.temperature, float(greedy), params.top_p, params.repetition_penalty]
