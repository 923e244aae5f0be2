"""Pieces of text of tokens, with a tokenizer whose characters are several tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelWords

from slime_core.errors import ModelError
from slime_viewer.token_text import open_decoder, token_pieces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A token for each byte."""
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevelWords.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevelWords(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_pieces_are_the_text(folder: Path) -> None:
    text = "a é 😀!  x\n"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    pieces = token_pieces(open_decoder(folder), ids)
    assert (len(pieces), "".join(pieces)) == (len(text.encode()), text)
    assert pieces[:4] == ["a", " ", "", "é"]
    assert pieces[5:9] == ["", "", "", "😀"]


def test_a_response_that_ends_within_a_character(folder: Path) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a😀").ids[:-1]
    pieces = token_pieces(open_decoder(folder), ids)
    assert (len(pieces), pieces[0]) == (4, "a")
    assert set(pieces[-1]) == {"\ufffd"}
    assert token_pieces(open_decoder(folder), []) == []


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read"):
        open_decoder(tmp_path)
