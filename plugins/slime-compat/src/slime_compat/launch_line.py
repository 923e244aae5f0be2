"""LaunchLine: the arguments of train.py, from a command line or from a script.

bash runs the script, because only bash can expand its arrays. The commands in it are recorded, not run: bash finds only a few
programs that read text, and everything that would start, end or write something is recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from slime_core.errors import ConfigError

ENTRIES: Final = ("train.py", "train_async.py")
TIMEOUT_S: Final = 60.0
READING: Final = (
    "awk",
    "basename",
    "cut",
    "date",
    "dirname",
    "expr",
    "grep",
    "head",
    "hostname",
    "readlink",
    "realpath",
)
READING_TOO: Final = ("sed", "seq", "sort", "tail", "tr", "uname", "wc")
CALLED: Final = """
    apptainer bash chmod conda cp curl docker git hf huggingface-cli kill killall ln mkdir mpirun mv nohup nvidia-smi
    pip pip3 pkill python python3 ray rm rmdir rocm-smi rsync sbatch scp sh singularity sleep srun ssh sudo tee timeout
    torchrun ulimit uv wandb wget
"""
"""Shell functions with these names override programs on the PATH that a script sets."""

# A recorded command prints nothing, which must not end the script. The name from mktemp is that of a new file.
PRELUDE: Final = """\
set -o noclobber
trap 'set +e +o pipefail' DEBUG
__called() { printf '%s\\0' "$#" "${PYTHONPATH-}" "$@" >> "$SLIME_COMPAT_CALLS"; [ "$1" != tee ] || cat > /dev/null; }
command_not_found_handle() { __called "$@"; return 0; }
mktemp() {
    local last="${*: -1}"
    printf '%s\\n' "${TMPDIR:-/tmp}/slime-compat.$$.$BASHPID.$RANDOM$([[ $last != *X* ]] || printf %s "${last##*X}")"
}
for __name in CALLED; do eval "$__name() { __called $__name \\"\\$@\\"; }"; done
unset __name
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    entry: str
    """Path of train.py or train_async.py, as written."""
    words: tuple[str, ...]
    """Its arguments."""
    python_path: tuple[str, ...]
    """Module search path of the launched Python: the folder of train.py, then PYTHONPATH."""
    is_env_unread: bool = False
    """Whether Ray's runtime environment could not be read, such as when a program that is not run makes it."""
    is_joined: bool = False
    """Whether its last arguments were written as a command of their own, because a backslash is missing before them."""

    @property
    def asynchronous(self) -> bool:
        return self.entry.endswith("train_async.py")


Reader: TypeAlias = "Callable[[Sequence[str], str], LaunchLine | None]"
"""Finds the launch line of one trainer in the words of a command and its PYTHONPATH."""


def from_words(words: Sequence[str], python_path: str = "") -> LaunchLine | None:
    """The launch line in these words, behind any wrappers (`ray job submit ... -- python3`). None if they start another
    program."""
    places = [n for n, word in enumerate(words) if Path(word).name in ENTRIES]
    if not places:
        return None
    at = places[0]
    of_env = of_runtime_env(words[:at])
    folders = [str(Path(words[at]).parent), *python_path.split(":"), *(of_env or ())]
    return LaunchLine(
        entry=words[at],
        words=tuple(words[at + 1 :]),
        python_path=tuple(dict.fromkeys(folder for folder in folders if folder)),
        is_env_unread=of_env is None,
    )


def of_runtime_env(words: Sequence[str]) -> list[str] | None:
    """The folders of PYTHONPATH in Ray's runtime environment. None if it is no JSON object."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, has_value, value = word.partition("=")
        if name == "--runtime-env-json":
            try:
                env = json.loads(value if has_value else following)
            except ValueError:
                return None
            of_env = env.get("env_vars") if isinstance(env, dict) else None
            return str(of_env.get("PYTHONPATH", "")).split(":") if isinstance(of_env, dict) else None
    return []


def from_script(
    script: Path,
    arguments: Sequence[str],
    *,
    reader: Reader = from_words,
    started: str = " or ".join(ENTRIES),
    example: str = "python3 train.py ...",
) -> LaunchLine:
    """The launch line that a script runs. ConfigError if it cannot be read, or does not start exactly one training.

    started: what `reader` looks for, and `example`: how its launch line begins, for messages."""
    if not script.is_file():
        raise ConfigError(f"{script}: no such launch script.")
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(
            f"{script}: bash is required to expand it. Pass the launch line after -- instead: -- {example}"
        )
    with tempfile.TemporaryDirectory() as made:
        calls, prelude, programs = Path(made, "calls"), Path(made, "prelude"), Path(made, "bin")
        calls.touch()
        prelude.write_text(PRELUDE.replace("CALLED", " ".join(CALLED.split())))
        programs.mkdir()
        for name in (*READING, *READING_TOO, "cat"):
            if (found := shutil.which(name)) is not None:
                (programs / name).symlink_to(found)
        env = {**os.environ, "PATH": str(programs), "BASH_ENV": str(prelude), "SLIME_COMPAT_CALLS": str(calls)}
        try:
            ended = subprocess.run(
                [bash, str(script), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{script}: bash did not finish within {TIMEOUT_S:g} s.") from None
        lines = [
            replace(line, is_joined=is_joined)
            for words, python_path, is_joined in joined(recorded(calls))
            if (line := reader(words, python_path)) is not None
        ]
    distinct = list(dict.fromkeys(lines))
    if len(distinct) == 1:
        return distinct[0]
    if distinct:
        raise ConfigError(
            f"{script}: it starts {len(distinct)} trainings. Pass the launch line of one after -- instead."
        )
    last = "\n".join(ended.stderr.strip().splitlines()[-3:])
    ending = f" bash ended with exit code {ended.returncode}: {last}" if ended.returncode else ""
    raise ConfigError(f"{script}: it starts no {started}.{ending}")


def joined(commands: Iterator[tuple[list[str], str]]) -> list[tuple[list[str], str, bool]]:
    """The commands, and whether words were added: a command whose name begins with a dash is the rest of the one before it."""
    found: list[tuple[list[str], str, bool]] = []
    for words, python_path in commands:
        if words[0].startswith("-") and found:
            before, path, _ = found[-1]
            found[-1] = ([*before, *words], path, True)
        else:
            found.append((words, python_path, False))
    return found


def recorded(calls: Path) -> Iterator[tuple[list[str], str]]:
    """Yields the words and the PYTHONPATH of each recorded command."""
    fields = calls.read_text(errors="replace").split("\0")[:-1]
    while fields:
        count = int(fields[0])
        yield fields[2 : 2 + count], fields[1]
        del fields[: 2 + count]
