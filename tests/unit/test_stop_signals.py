"""Which signals end a run at the next clean point, and which at once."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from slime_core.cli.stop_signals import EarlyInterrupt, StopSignals
from slime_core.errors import HungUp, Interrupted, Terminated

SCRIPT = """
import asyncio, os, signal, sys
from slime_core.cli.stop_signals import StopSignals

async def main():
    with StopSignals() as signals:
        stop = asyncio.Event()
        signals.started(stop)
        os.close(2)  # the terminal is gone
        for name in sys.argv[1:]:
            os.kill(os.getpid(), getattr(signal, name))
        await stop.wait()
        raise SystemExit(signals.interrupted("").exit_code)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("SIGHUP", 129),
        # A closed terminal sends it more than once.
        ("SIGHUP SIGHUP SIGHUP", 129),
        ("SIGTERM SIGHUP", 143),
        ("SIGHUP SIGTERM", 129),
        ("SIGINT", 130),
        # At once: the process ends with the code of the second one.
        ("SIGINT SIGTERM", 128 + 15),
        ("SIGHUP SIGTERM SIGINT", 128 + 2),
    ],
)
def test_signals(sent, code):
    assert subprocess.run([sys.executable, "-c", SCRIPT, *sent.split()], check=False).returncode == code


def test_a_hangup_that_is_ignored_stays_ignored():
    """Of nohup."""

    async def hang_up():
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            return signals.received

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(hang_up()) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_error_of_a_signal_has_its_exit_code():
    assert [error.exit_code for error in (HungUp, Interrupted, Terminated)] == [129, 130, 143]


def test_an_early_ctrl_c_that_was_made_another_error_is_one():
    """As Python 3.11 does with what is raised inside `__set_name__`."""

    def importing():
        with EarlyInterrupt():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise RuntimeError("Error calling __set_name__") from error

    with pytest.raises(KeyboardInterrupt):
        importing()
    with pytest.raises(RuntimeError), EarlyInterrupt():
        raise RuntimeError("an error of its own")
