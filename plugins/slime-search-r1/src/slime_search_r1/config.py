"""Options of slime-search-r1."""

from __future__ import annotations

from pydantic import Field, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class SearchR1Config(DriverConfig):
    """One of `search_url` and `corpus` is needed."""

    search_url: str | None = None
    """A retrieval server, such as http://127.0.0.1:8000: `slime-retrieval serve`, or one that speaks Search-R1's /retrieve."""
    search_token_file: RunPath | None = None
    """File with the bearer token that this server wants."""
    corpus: RunPath | None = None
    """JSON lines with title and text. A retrieval server over them is started for the run and ends with it."""
    topk: int = Field(3, ge=0)
    """Documents that a search finds. 0: none at all, nobody is asked; what a model without its tool can do."""
    max_turns: int = Field(2, gt=0)
    """How often the model may write. A search of the last turn is not carried out, and an answer that never comes is
    truncated."""
    max_information_tokens: int = Field(512, gt=0)
    """What is found is cut to so many tokens, for each search."""
    search_timeout: float = Field(30.0, gt=0)
    """Seconds for one request to the server, of up to 64 searches."""
    search_attempts: int = Field(3, gt=0)
    """Requests before searches fail. A failed search fails the sample, which the run tries again (`max_retries`)."""
    search_connections: int = Field(16, gt=0)
    """Requests at a time."""

    @model_validator(mode="after")
    def one_server(self) -> SearchR1Config:
        if (self.search_url is None) == (self.corpus is None):
            raise ValueError("give either search_url, a server that is there, or corpus, for one that the run starts")
        if self.search_token_file is not None and self.search_url is None:
            raise ValueError(
                "search_token_file goes with search_url; a server that the run starts has a token of its own"
            )
        if self.search_url is not None and not self.search_url.startswith(("http://", "https://")):
            raise ValueError(f"search_url {self.search_url!r}: an address such as http://127.0.0.1:8000 is wanted")
        return self


class ExactMatchConfig(DriverConfig):
    format_score: float = Field(0.2, ge=0, le=1)
    """Earned by a wrong answer whose tags are in order; taken from a right answer whose tags are not."""
