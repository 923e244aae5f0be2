"""radix_cache: maps conversations in text to their exact tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.types.sample import VersionSpan
from slime_router.errors import BadRequest
from slime_router.radix_tree import RadixTree
from slime_router.segment import Exact, Segment, exact, token_ids_of
from slime_router.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from starlette.routing import Route

    from slime_core.types.completion import Completion, GenerateRequest

LONG_TEXT: Final = 16_384
"""Longer texts (in characters) are tokenized in a thread, so that other requests do not wait for some milliseconds."""


class ExactTokens(RouterMiddleware):
    """Replaces the text of a request by tokens: the longest known prefix keeps its exact tokens, and only the rest is
    tokenized. Text that the model generated is never tokenized again: it keeps its tokens and log-probs. Requests with
    tokens are forwarded unchanged."""

    def __init__(self, pieces: TextTokenizer, conversations: RadixTree) -> None:
        self._pieces = pieces
        self._conversations = conversations
        self._requests = 0
        self._known_tokens = 0
        self._new_tokens = 0

    async def __call__(self, request: GenerateRequest, call_next: Next) -> Completion:
        text = request.text
        if text is None or len(request.token_ids):
            return await call_next(request)
        session = request.session_id or ""
        prompt, num_new = await self._prompt(session, text)
        prompt_token_ids = token_ids_of(prompt)
        if not len(prompt_token_ids):
            raise BadRequest(f"request {request.request_id}: the text has no tokens")
        self._requests += 1
        self._new_tokens += num_new
        self._known_tokens += len(prompt_token_ids) - num_new
        completion = await call_next(replace(request, token_ids=prompt_token_ids))
        self._keep(session, text, prompt, completion)
        return replace(completion, prompt_token_ids=prompt_token_ids)

    async def retrieve(self, text: str, session_id: str | None = None) -> Exact:
        """The tokens of a conversation, generated or sent. Unknown text is tokenized and counts as the caller's."""
        prompt, _ = await self._prompt(session_id or "", text)
        return exact(prompt)

    async def _prompt(self, session: str, text: str) -> tuple[Segment | None, int]:
        """The segments of the text, and how many of their tokens are new."""
        known = self._conversations.longest(session, text)
        rest = text[known.length :]
        if not rest:
            return known.segment, 0
        if len(rest) > LONG_TEXT:
            token_ids = await asyncio.to_thread(self._pieces.encode, rest)
        else:
            token_ids = self._pieces.encode(rest)
        written = Segment.written(known.segment, token_ids)
        self._conversations.mark(session, text, written, num_characters=len(rest))
        return written, len(token_ids)

    def _keep(self, session: str, text: str, prompt: Segment | None, completion: Completion) -> None:
        token_ids = completion.token_ids
        # The caller's next text may or may not contain the token that ends a turn: both positions are marked.
        cut = len(token_ids) - self._pieces.num_special_at_end(token_ids)
        for start, end in ((0, cut), (cut, len(token_ids))):
            if start == end:
                continue
            part = token_ids[start:end]
            piece = self._pieces.decode(part)
            prompt = Segment(
                parent=prompt,
                token_ids=part,
                log_probs=completion.log_probs[start:end],
                sampled=True,
                spans=spans_within(completion.spans, start, end),
            )
            text += piece
            self._conversations.mark(session, text, prompt, num_characters=len(piece))

    def metrics(self) -> Mapping[str, Any]:
        return {
            "requests": self._requests,
            "known_tokens": self._known_tokens,
            "new_tokens": self._new_tokens,
            "marks": len(self._conversations),
            "bytes": self._conversations.num_bytes,
            "forgotten": self._conversations.forgotten,
        }

    def routes(self) -> Sequence[Route]:
        """The path that this middleware adds: POST /retrieve_from_text."""
        from slime_router.retrieval import retrieval

        return [retrieval(self)]


def spans_within(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans clipped to tokens [start, end), counted from `start`."""
    clipped = (VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start) for s in spans)
    return tuple(span for span in clipped if span.start < span.end)
