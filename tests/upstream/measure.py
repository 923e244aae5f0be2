"""Translates every launch line of a checkout of upstream slime, and starts each run file with --dry-run.

    python tests/upstream/measure.py CHECKOUT [--dry-run] [--only TEXT ...]

Models are substitutes: the config.json of a public model of this name, a small tokenizer and no weights. Data files are made
up. Paths that begin with / are moved into a folder for temporary files. Functions of upstream import pylatexenc, aiohttp,
omegaconf and pybase64, which must be installed; the packages of substitute_modules.py need not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from launch_lines import launch_lines

from slime_compat.command import translated
from slime_compat.launch_line import LaunchLine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="also start each run file with --dry-run")
    parser.add_argument("--only", nargs="+", default=[""], help="scripts whose path contains one of these")
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lines = list(launch_lines(typed.checkout.resolve(), folder, typed.only))
        translations = {}
        failed = {}
        for name, line in lines:
            if isinstance(line, LaunchLine):
                translations[name] = translated(line)
            else:
                failed[name] = str(line)
        of_training = {
            name: [note for note in translation.notes if note.trains] for name, translation in translations.items()
        }
        noted = {name: notes for name, notes in of_training.items() if notes}
        print(f"{len(lines)} lines: {len(translations) - len(noted)} without a note that training changes, ", end="")
        print(f"{len(noted)} with one, {len(failed)} failed")
        for name, why in failed.items():
            print(f"  failed  {name}: {why}")
        for (flag, text), count in Counter(
            (note.flag, note.text) for notes in noted.values() for note in notes
        ).most_common():
            print(f"  {count:3}  {flag}: {text}")
        if typed.dry_run:
            from dry_runs import dry_runs

            reasons = dry_runs(translations, folder, typed.checkout.resolve())
            accepted = [name for name, reason in reasons.items() if not reason]
            print(f"{len(reasons)} dry runs: {len(accepted)} accepted, {len(reasons) - len(accepted)} rejected")


if __name__ == "__main__":
    main()
