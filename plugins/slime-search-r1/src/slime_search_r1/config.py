"""Options of slime-search-r1."""

from __future__ import annotations

from pydantic import Field, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class SearchR1Config(DriverConfig):
    """Exactly one of `search_url` and `corpus` is required."""

    search_url: str | None = None
    """Address of a retrieval server, such as http://127.0.0.1:8000: `slime-retrieval serve`, or Search-R1's own."""
    search_token_file: RunPath | None = None
    """File with the bearer token that this server requires."""
    corpus: RunPath | None = None
    """JSON lines with title and text. The run starts a retrieval server with them, which ends with the run."""
    topk: int = Field(3, ge=0)
    """Documents that a search returns. 0: none, and no request is sent, to measure the model without its tool."""
    max_turns: int = Field(2, gt=0)
    """Turns of the model. A search in the last turn is not run, and a response without an answer by then is truncated."""
    max_information_tokens: int = Field(512, gt=0)
    """Limit on the tokens of the documents of one search; the rest is cut."""
    search_timeout: float = Field(30.0, gt=0)
    """Seconds for one request to the server, of up to 64 searches."""
    search_attempts: int = Field(3, gt=0)
    """Attempts before a search fails. A failed search fails the sample, which the run retries (`max_retries`)."""
    search_connections: int = Field(16, gt=0)
    """Concurrent requests."""

    @model_validator(mode="after")
    def one_server(self) -> SearchR1Config:
        if (self.search_url is None) == (self.corpus is None):
            raise ValueError("set either search_url, for a running server, or corpus, for one that the run starts")
        if self.search_token_file is not None and self.search_url is None:
            raise ValueError(
                "search_token_file requires search_url; a server that the run starts has a token of its own"
            )
        if self.search_url is not None and not self.search_url.startswith(("http://", "https://")):
            raise ValueError(f"search_url = {self.search_url!r}: must be an address such as http://127.0.0.1:8000")
        return self


class ExactMatchConfig(DriverConfig):
    format_score: float = Field(0.2, ge=0, le=1)
    """Reward of a wrong answer with well-formed tags; subtracted for a right answer without them."""
