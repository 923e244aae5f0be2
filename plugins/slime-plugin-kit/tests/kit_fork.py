"""`pytest` as forks of one process that has imported what takes seconds and is not of the kit: each line of JSON on standard
input is a command, and is served by a line with its exit code."""

import json
import os
import sys

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401

import slime_core.cli.main
import slime_core.config.run
import slime_core.rollout.client  # noqa: F401


def command(words: list[str], folder: str, path: list[str], out: str) -> int:
    opened = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(opened, number)
    os.chdir(folder)
    # As `python -m pytest` with these folders in PYTHONPATH, which its own processes read.
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[:0] = [folder, *path]
    sys.argv = ["pytest", *words]
    return int(pytest.main(words))


for line in sys.stdin:
    if not (pid := os.fork()):
        code = 70
        try:
            code = command(**json.loads(line))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
