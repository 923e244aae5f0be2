"""Records the outputs of a checkout's commands as text files in a folder: `make record OUT=folder`.

Two recordings of the same checkout on the same machine are equal to the byte, so `diff -r A B` shows what a change did.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final

import commands
import demo
from checkout import Checkout
from forked import forked

PLACES: Final = 2
WORK: Final = Path(tempfile.gettempdir()) / "slime-record"
"""The same in every recording: the fingerprint of a run contains the places of its model and data."""

USAGE: Final = """\
Writes into a folder, as plain text:

  help/         --help of every command, found by walking; `slime run --help` with every example's run file and by itself
  plugins/      `slime plugins --json` and --check, `slime plugins show` of every plugin
  config/       the JSON schema of run files, with the options of every backend, engine, algorithm and reward; explain
  commands/     the other commands on the demo: --dry-run, plan, eval, models, new, convert, view, doctor
  mistakes/     error messages of typical mistakes
  demo/         the first ten steps of examples/arithmetic: metrics, files, and checksums of the weights before and after
  made.txt            checksums of the files that models new, new and convert have written
  distributions.txt   names and versions of what is installed of slime

Every file of a command has its words, its exit code, standard output and standard error. Places, ports, free disk, durations
and the versions of slime's distributions are replaced by names in angle brackets; metrics named perf/ have no values.

To compare two recordings: diff -r A B. Nothing is printed when they are equal. Bits of floating point depend on the CPU, so
compare recordings made on the same machine."""


def record(checkout: Checkout, out: Path) -> None:
    """Fills `out`. The demo is started as users do; the commands beside it are forks, two at a time."""
    with ThreadPoolExecutor(PLACES) as pool, forked(checkout, PLACES) as forks:
        trained = pool.submit(demo.record, checkout, out / "demo")
        found = commands.standalone(checkout, forks)
        written = [pool.submit(commands.write, forks, case, out) for case in found]
        trained.result()
        written += [pool.submit(commands.write, forks, case, out) for case in commands.after_the_demo()]
        wait(written)
    (out / "made.txt").write_text("".join(commands.made(checkout.work)))
    (out / "distributions.txt").write_text(checkout.distributions())


def wait(futures: list[Future[None]]) -> None:
    """Raises the first error."""
    for future in futures:
        future.result()


def wait_for_turn(lock: IO[str]) -> None:
    """One recording at a time on a machine: they share a place to work in."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"Another recording is running in {WORK}: waiting for its end.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="record.py", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write; must not exist yet")
    parser.add_argument(
        "--checkout",
        type=Path,
        default=Path(__file__).parents[2],
        help="whose .venv and examples are recorded; by default the one that this file is in",
    )
    typed = parser.parse_args()
    if typed.out.exists():
        sys.exit(f"{typed.out}: is there already. Name another folder, or remove it.")
    checkout = Checkout(typed.checkout.resolve(), WORK)
    if not checkout.slime.exists():
        sys.exit(f"{checkout.slime}: not there. Run `make .venv/.test` in {checkout.root} first.")
    with WORK.with_suffix(".lock").open("w") as lock:
        wait_for_turn(lock)
        shutil.rmtree(WORK, ignore_errors=True)
        checkout.prepare()
        record(checkout, typed.out)
        shutil.rmtree(WORK)
    print(
        f"{typed.out}: {sum(path.is_file() for path in typed.out.rglob('*'))} files. Compare: diff -r OTHER {typed.out}"
    )


if __name__ == "__main__":
    main()
