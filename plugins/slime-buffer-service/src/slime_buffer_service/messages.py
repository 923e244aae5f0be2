"""Bodies of the agents' requests. All fields are validated, and unknown fields are refused."""

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
    """Maximum number of prompts."""
    wait_s: Finite = Field(0.0, ge=0, le=MAX_WAIT_S)
    """Seconds to wait for the first one."""


class Trajectory(Message):
    """One response. All lists have the length of `token_ids`: the response without the prompt and the kept tokens."""

    ticket: str = Field(max_length=256)
    token_ids: Tokens
    log_probs: Annotated[list[Annotated[float, Field(le=0, allow_inf_nan=False)]], Field(max_length=MAX_TOKENS)]
    """Nats, under the policy that sampled, at the ticket's temperature; 0 where the mask is 0."""
    loss_mask: Annotated[list[Literal[0, 1]], Field(max_length=MAX_TOKENS)] | None = None
    """1 = trained; 0 = tokens of a tool or the environment. None: the policy sampled all tokens."""
    version: int | None = None
    """Policy version that sampled all tokens. None: the version of the ticket."""
    spans: list[tuple[int, int, int]] | None = Field(None, max_length=MAX_TOKENS)
    """[version, start, end) of every range of tokens that the policy generated, in order. Replaces `version`."""
    status: Literal["completed", "truncated"] = "completed"
    reward: Finite | None = None
    """None: the run's reward scores it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Stored with the sample; overrides keys of the prompt's metadata."""
    counts: dict[str, Finite] = Field(default_factory=dict)
    """Numbers such as turns and tool calls; their means are metrics."""


class AddSamples(Message):
    """POST /add_samples. Each trajectory is validated by itself, so they are dicts here."""

    samples: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_SAMPLES)


class Generate(Message):
    """POST /generate: the run's engines continue these tokens, for agents without an engine."""

    ticket: str = Field(max_length=256)
    token_ids: Tokens = Field(min_length=1)
    """The prompt and all tokens so far."""
    max_new_tokens: int | None = Field(None, ge=1)
    """None: what is left of the ticket's budget."""
    stop: list[str] = Field(default_factory=list, max_length=16)
