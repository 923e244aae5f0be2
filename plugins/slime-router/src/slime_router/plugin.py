"""Drivers of the middlewares, which the entry points name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slime_core.contracts.example import Example
from slime_core.contracts.middleware import MiddlewareDriver, RouterMiddleware
from slime_router.config import (
    LoadBalanceConfig,
    PriorityConfig,
    RadixCacheConfig,
    RateLimitConfig,
    RecordConfig,
    RetryConfig,
    SessionAffinityConfig,
)


class LoadBalance(MiddlewareDriver):
    """Sends each request to the engine with the least work in flight, instead of round robin."""

    Config = LoadBalanceConfig

    @classmethod
    def build(cls, config: LoadBalanceConfig) -> RouterMiddleware:
        from slime_router.load_balance import LeastLoad

        return LeastLoad(in_tokens=config.measure == "tokens")


class SessionAffinity(MiddlewareDriver):
    """Sends a conversation's requests to the engine that served the previous one, which has them in its cache."""

    Config = SessionAffinityConfig

    @classmethod
    def build(cls, config: SessionAffinityConfig) -> RouterMiddleware:
        from slime_router.session_affinity import StickySessions

        return StickySessions(strict=config.strict, max_sessions=config.max_sessions)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"strict": True, "max_sessions": 2})]


class Priority(MiddlewareDriver):
    """A priority queue before the engines: the most urgent requests go first, equal ones in order of arrival."""

    Config = PriorityConfig

    @classmethod
    def build(cls, config: PriorityConfig) -> RouterMiddleware:
        from slime_router.priority import PriorityQueue

        return PriorityQueue(concurrency=config.concurrency, levels=dict(config.levels), max_waiting=config.max_waiting)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"concurrency": 1, "levels": {"train/1": 3, "eval": 1}, "max_waiting": 100})]


class RateLimit(MiddlewareDriver):
    """Spreads requests over time."""

    Config = RateLimitConfig

    @classmethod
    def build(cls, config: RateLimitConfig) -> RouterMiddleware:
        from slime_router.rate_limit import RateLimiter

        return RateLimiter(
            requests_per_second=config.requests_per_second, burst=config.burst, max_wait_s=config.max_wait_s
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"requests_per_second": 500, "burst": 2})]


class Retry(MiddlewareDriver):
    """Sends a request again if no engine accepted it, or if its engine was lost before it responded."""

    Config = RetryConfig

    @classmethod
    def build(cls, config: RetryConfig) -> RouterMiddleware:
        from slime_router.retry import Retries

        return Retries(
            attempts=config.attempts,
            backoff_s=config.backoff_s,
            max_backoff_s=config.max_backoff_s,
            deadline_s=config.deadline_s,
        )


class Record(MiddlewareDriver):
    """Writes requests and responses to a file, or replays them from such a file without an engine."""

    Config = RecordConfig

    @classmethod
    def build(cls, config: RecordConfig) -> RouterMiddleware:
        from slime_router.record import Recorder, Replayer
        from slime_router.recording import RecordingReader, RecordingWriter

        path = Path(config.path)
        if config.mode == "record":
            return Recorder(RecordingWriter(path))
        return Replayer(RecordingReader(path), forward=config.on_missing == "forward")

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        empty = folder / "empty.jsonl"
        empty.touch()
        return [
            Example(options={"path": str(folder / "answers.jsonl")}),
            Example(options={"path": str(empty), "mode": "replay", "on_missing": "forward"}),
        ]


class RadixCache(MiddlewareDriver):
    """Turns the text of a conversation into exactly the tokens that engines received and generated."""

    Config = RadixCacheConfig

    @classmethod
    def build(cls, config: RadixCacheConfig) -> RouterMiddleware:
        from slime_router.radix_cache import ExactTokens
        from slime_router.radix_tree import RadixTree
        from slime_router.text_tokenizer import load_tokenizer

        conversations = RadixTree(max_bytes=config.max_bytes, keep_versions=config.keep_versions)
        return ExactTokens(load_tokenizer(Path(config.tokenizer)), conversations)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        tokenizer = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": {chr(97 + n): n for n in range(26)}, "unk_token": "a"},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return [Example(options={"tokenizer": str(folder)})]
