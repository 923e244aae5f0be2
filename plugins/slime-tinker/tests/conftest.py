"""One folder for the cookbook and one server without keys for all tests of the SDK; its environment is made by the Makefile."""

import sys
from pathlib import Path

import pytest

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from cookbook_folder import MODEL, make_cookbook_folder
from served_process import served_process


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory):
    return make_cookbook_folder(tmp_path_factory.mktemp("cookbook"))


@pytest.fixture(scope="session")
def model(cookbook):
    return cookbook / MODEL


@pytest.fixture
def new_server(model, tmp_path):
    """Starts a server in a new folder, with these options of the command; it is ended after the test."""
    started = []

    def start(*options, folder="server"):
        server = served_process(tmp_path / folder, model, "--name", MODEL, *options)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    server = served_process(tmp_path_factory.mktemp("served"), model, "--name", MODEL, "--no-keys", "--max-models", "4")
    server.start()
    yield server
    assert server.stop() == 0
