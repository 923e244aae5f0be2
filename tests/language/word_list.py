"""Words that this project does not use, in identifiers, comments, docstrings, messages and docs.

`python tests/language/word_list.py [PATH ...]` prints every use with the word to take instead, and exits 1 if there is one.
`word_list.toml` has the words, and where one is allowed with the reason. `make lint` runs it over the whole tree.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CODE_IN_MARKDOWN: Final = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)
CODE_IN_TEXT: Final = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}")
PARTS_OF_A_NAME: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """A word, as a regular expression over whole words, and what to write."""

    pattern: re.Pattern[str]
    instead: str
    allowed: tuple[str, ...]
    """Globs of the paths that may have it."""


def rules() -> list[Rule]:
    content = tomllib.loads((Path(__file__).parent / "word_list.toml").read_text(encoding="utf-8"))
    found = []
    for word in content["words"]:
        allowed = [path for allow in content["allow"] if word["use"] in allow["words"] for path in allow["paths"]]
        found.append(Rule(re.compile(rf"\b(?:{word['not']})\b", re.IGNORECASE), word["use"], tuple(allowed)))
    return found


def exempt() -> list[str]:
    content = tomllib.loads((Path(__file__).parent / "word_list.toml").read_text(encoding="utf-8"))
    return list(content["exempt"])


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of everything in a file that is language."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blanked = CODE_IN_MARKDOWN.sub(lambda code: "\n" * code.group().count("\n"), content)
        yield from enumerate(blanked.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], " ".join(PARTS_OF_A_NAME.findall(token.string))
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            prose = CODE_IN_TEXT.sub("", token.string)
            yield from enumerate(prose.splitlines(), token.start[0])


def uses(path: Path, name: str, checked: list[Rule]) -> Iterator[str]:
    applying = [rule for rule in checked if not any(fnmatch(name, allowed) for allowed in rule.allowed)]
    for line, text in texts(path):
        for rule in applying:
            for use in rule.pattern.finditer(text):
                yield f"{name}:{line}: {use.group()!r}: write {rule.instead}"


def main(arguments: list[str]) -> int:
    listed = subprocess.run(["git", "ls-files", "--", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    skipped, checked, count = exempt(), rules(), 0
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in (".py", ".md") and path.is_file() and not any(fnmatch(name, glob) for glob in skipped):
            for use in uses(path, name, checked):
                print(use)
                count += 1
    if count:
        print(f"{count} words of tests/language/word_list.toml")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
