"""A third-party wheel is installed, and the contract kit tests what it registers."""

import subprocess
import sys


def test_a_strangers_wheel_keeps_its_contracts(install_third_party, tmp_path):
    acme = install_third_party("acme-slime")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--slime-plugin", "acme-slime"]
    done = subprocess.run(command, cwd=tmp_path, env=acme.env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "slime acme_watch (acme-slime 1.2.3): 1 of 1 cases run (entries 1)",
        "slime.advantages acme_rank (acme-slime 1.2.3): ",
        "slime.kl acme_half (acme-slime 1.2.3): ",
        "slime.rewards acme (acme-slime 1.2.3): ",
    ):
        assert line in done.stdout
