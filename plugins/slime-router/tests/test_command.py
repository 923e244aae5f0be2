"""The command slime-router, in a process of its own."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from slime_router.server import serve
from slime_router.server.cli import main

COMMAND = [sys.executable, "-c", "from slime_router.server.cli import main; main()"]


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """The command in this process, in its own folder: exit code, and what it prints on stderr."""

    def run(*words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["slime-router", *words])
        monkeypatch.setattr(serve, "run", lambda *how, **options: pytest.fail("it serves"))
        with pytest.raises(SystemExit) as exit_code:
            main()
        printed = capsys.readouterr()
        assert printed.out == ""
        return exit_code.value.code, printed.err

    return run


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--middleware", "radix_cash"], 2, "unknown router middleware; close match: radix_cache"),
        (["--middleware", '{ name = "retry", attemps = 3 }'], 2, "attemps"),
        (["--middleware", '{ name = "retry", attempts = "x" }'], 2, "attempts"),
        (["--middleware", "{ name = "], 2, "a TOML table such as"),
        (["--middleware", '{ name = "record", path = "none.jsonl", mode = "replay" }'], 3, "none.jsonl"),
        (["--upstream", "127.0.0.1:30000"], 2, "not an address"),
        (["--upstream-token-file", "nowhere"], 8, "nowhere: the token cannot be read"),
        (["--token-file", "empty"], 2, "there is no token in it"),
        (["--host", "203.0.113.1"], 2, "cannot listen there"),
        (["--log-level", "loud"], 2, "one of debug"),
        (["--host", "203.0.113.1", "--no-token"], 2, "all callers that reach this machine"),
    ],
)
def test_a_mistake_is_reported_in_one_paragraph(ended, tmp_path, words, code, expected):
    (tmp_path / "empty").touch()
    got, message = ended("--port", "0", *words)
    assert got == code, message
    assert message.startswith("error: ")
    assert expected in message


def test_all_mistakes_are_reported_at_once(ended):
    _, message = ended("--middleware", "unknown_one", "--middleware", '{ name = "priority", concurrency = 0 }')
    assert "unknown_one" in message
    assert "concurrency" in message


def test_a_port_in_use(ended):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, message = ended("--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "cannot listen there: Address already in use. Pass --port 0 for any free port" in message


def test_it_listens_on_loopback_and_requires_a_token(tmp_path):
    words = [*COMMAND, "--port", "0", "--upstream", "http://127.0.0.1:9", "--middleware", "retry"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.fullmatch(
            r"slime-router listens on (http://127\.0\.0\.1:\d+), token in slime-router\.token\n", line
        )
        assert address is not None, (line, process.stderr.read() if process.poll() is not None else "")
        token_file = tmp_path / "slime-router.token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        token = token_file.read_text().strip()
        assert len(token) >= 32
        url = f"{address[1]}/workers"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=10)
        asked = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=10) as response:
            assert [one["url"] for one in json.load(response)["workers"]] == ["http://127.0.0.1:9"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
        # A second start takes the same token.
        assert token_file.read_text().strip() == token
    finally:
        process.kill()
        process.communicate()
