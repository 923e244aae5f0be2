"""What agents post, and what they are given. Everything is checked; nothing unknown is accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SAMPLES = 4096
MAX_WAIT_S = 60.0
MAX_TOKENS = 2**22

Finite = Annotated[float, Field(allow_inf_nan=False)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GetSamples(Message):
    """POST /get_samples."""

    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Prompts at most."""
    wait_s: Finite = Field(0.0, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for the first one."""


class Trajectory(Message):
    """One answer. The vectors are as long as `token_ids`, the response without prompt and without what was kept."""

    ticket: str = Field(max_length=256)
    token_ids: Tokens
    log_probs: Annotated[list[Annotated[float, Field(le=0, allow_inf_nan=False)]], Field(max_length=MAX_TOKENS)]
    """Nats, under the policy that sampled, at the ticket's temperature; 0 where the mask is 0."""
    loss_mask: Annotated[list[Literal[0, 1]], Field(max_length=MAX_TOKENS)] | None = None
    """1 = trained; what a tool or the environment wrote is 0. None: all were sampled by the policy."""
    version: int | None = None
    """Policy version that sampled all of it. None: the one that the ticket was given out with."""
    spans: list[tuple[int, int, int]] | None = Field(None, max_length=MAX_TOKENS)
    """[version, start, end) of every stretch of tokens that the policy wrote, in order, instead of `version`."""
    status: Literal["completed", "truncated"] = "completed"
    reward: Finite | None = None
    """None: the run's reward scores it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Kept with the sample, over the prompt's own."""
    counts: dict[str, Finite] = Field(default_factory=dict)
    """Such as turns and calls of tools: their means are metrics."""


class AddSamples(Message):
    """POST /add_samples. Each is judged by itself, so the trajectories come unparsed."""

    samples: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_SAMPLES)


class Generate(Message):
    """POST /generate: the run's engines go on from these tokens, for who has none of its own."""

    ticket: str = Field(max_length=256)
    token_ids: Tokens = Field(min_length=1)
    """Prompt and everything so far."""
    max_new_tokens: int | None = Field(None, ge=1)
    """None: what is left of the ticket's budget."""
    stop: list[str] = Field(default_factory=list, max_length=16)
