import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic import ValidationError

from slime_core.errors import ConfigError, RewardError
from slime_core.types.prompt import Prompt
from slime_search_r1.exact_match import labels_of
from slime_search_r1.plugin import ExactMatch, SearchR1


def test_entry_points_resolve() -> None:
    assert entry_points(group="slime.generators")["search_r1"].load() is SearchR1
    assert entry_points(group="slime.rewards")["exact_match"].load() is ExactMatch
    for driver in (SearchR1, ExactMatch):
        assert all(field.description for field in driver.Config.model_fields.values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "either search_url"),
        ({"search_url": "http://x", "corpus": "c"}, "either search_url"),
        ({"search_url": "localhost:8000"}, "http://127.0.0.1:8000"),
        ({"corpus": "c", "search_token_file": "t"}, "a token of its own"),
        ({"corpus": "c", "max_turns": 0}, "max_turns"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        SearchR1.Config(**options)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generate\.corpus = .*none: no such file"):
        SearchR1.build(SearchR1.Config(corpus=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"search_token_file = .*none: cannot be read"):
        SearchR1.build(SearchR1.Config(search_url="http://x", search_token_file=str(tmp_path / "none")))


@pytest.mark.parametrize("label", [None, 3, [], ["a", 3]])
def test_a_label_that_is_no_text(label: object) -> None:
    import numpy as np

    prompt = Prompt(group_index=0, text="q", token_ids=np.array([1], np.int32), label=label, origin="train.jsonl:7")
    with pytest.raises(RewardError, match=r"train\.jsonl:7: exact_match requires a text as label"):
        labels_of(prompt)


def test_listing_imports_nothing_heavy() -> None:
    heavy = "('torch', 'httpx', 'bm25s', 'starlette', 'numpy')"
    code = f"import sys, slime_search_r1.plugin; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
