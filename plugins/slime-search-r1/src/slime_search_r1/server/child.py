"""The server process that a run starts. It reads the token from the first line of stdin, prints the port as a line of JSON,
and ends when stdin closes, which is also when the run's process ends."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from slime_core.errors import SlimeError
from slime_search_r1.server.app import create_app
from slime_search_r1.server.corpus import read_corpus
from slime_search_r1.server.index import Index
from slime_search_r1.server.serve import BACKLOG, server_of
from slime_serving.listener import listen


def main() -> None:
    token = sys.stdin.readline().strip()
    try:
        index = Index(read_corpus(Path(sys.argv[1])))
        listener = listen("127.0.0.1", 0, backlog=BACKLOG)
    except SlimeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(error.exit_code)
    server = server_of(create_app(index, token))

    def end_with_the_run() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_the_run, daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
