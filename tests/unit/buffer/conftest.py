from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}[{{ tools | map(attribute='name') | join(',') }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if shout %}!{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, its id the code point; `^` would be put in front if special tokens were added."""
    vocab = {chr(code): code for code in range(256)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", ord("^"))])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="^", chat_template=TEMPLATE)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (or raw lines) to a .jsonl file and gives its path."""

    def write(rows: Iterable[Mapping[str, Any] | str], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write
