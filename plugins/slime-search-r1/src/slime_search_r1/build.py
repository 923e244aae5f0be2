"""Builds the generator and its client of the retrieval server from the options."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import ConfigError
from slime_search_r1.config import SearchR1Config
from slime_search_r1.generator import SearchR1Generator
from slime_search_r1.places import GivenServer, OwnServer
from slime_search_r1.searches import Searches


def build_generator(config: SearchR1Config) -> SearchR1Generator:
    """ConfigError if a file that the options name is missing."""
    if config.corpus is not None and not Path(config.corpus).is_file():
        raise ConfigError(
            f"generate.corpus = {config.corpus}: no such file. It must be a file of JSON lines with title and text."
        )
    searches = Searches(
        OwnServer(Path(config.corpus)) if config.corpus is not None else given_server(config),
        topk=config.topk,
        timeout_s=config.search_timeout,
        attempts=config.search_attempts,
        connections=config.search_connections,
    )
    return SearchR1Generator(searches, max_turns=config.max_turns, max_information_tokens=config.max_information_tokens)


def given_server(config: SearchR1Config) -> GivenServer:
    assert config.search_url is not None
    token = None
    if config.search_token_file is not None:
        try:
            token = Path(config.search_token_file).read_text().strip()
        except OSError as error:
            path = config.search_token_file
            raise ConfigError(f"generate.search_token_file = {path}: cannot be read: {error.strerror}.") from None
    return GivenServer(config.search_url, token)
