"""A server with SGLang's routes and no model. `python -m fake_sglang` reads its options like the real one's launcher."""

import json
import os
import signal
import socket
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEATH = """\
Traceback (most recent call last):
ModuleNotFoundError: No module named 'optional'
[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("x")
ValueError: context_length is too long

[2026-01-01 00:00:01] Received sigquit from a child process.
Traceback (most recent call last):
EOFError"""

STARVED = """\
[torch_memory_saver.cpp] cu_mem_create has CUDA_ERROR_OUT_OF_MEMORY
[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=181
[2026-01-01 00:00:00] Subprocess scheduler_0 (pid=7) crashed with exit code 1. Triggering SIGQUIT for cleanup...
"""
"""torch_memory_saver's own lines; its process ends, and a second later the server."""


class FakeSglang(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model_info, *, token="tok", port=0, behave="well"):
        """`behave`: also the status that requests are refused with."""
        super().__init__(("127.0.0.1", port), Handler)
        self.model_info = {"weight_version": "default", **model_info}
        self.token, self.behave = token, behave
        self.server_info = {"version": "0.0", "tp_size": 1}
        self.requests = []
        self.paused = False

    @property
    def address(self):
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.respond()

    do_POST = do_GET

    def respond(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        options = json.loads(body) if body else {}
        server.requests.append((self.path, options))
        # SGLang requires no token for this route either.
        if self.path != "/health" and self.headers.get("Authorization") != f"Bearer {server.token}":
            return self.send(401, {"error": "Unauthorized"})
        if self.path == "/generate":
            return self.generate(options)
        if "weight_version" in options and server.behave != "keeps its version":
            server.model_info["weight_version"] = options["weight_version"]
        if self.path == "/resume_memory_occupation" and server.behave == "starves":
            os.write(2, STARVED.encode())
            os.killpg(0, signal.SIGKILL)
        if self.path == "/freeze_gc":
            os.write(1, b"frozen\n")
        if self.path in ("/pause_generation", "/continue_generation"):
            server.paused = self.path == "/pause_generation"
        # Both generate a token to see, which a paused scheduler does not.
        if self.path.startswith("/health") and server.paused:
            return self.send(503, "")
        if server.behave == "is busy":
            return self.send(503, {"error": "no room"})
        if self.path == "/update_weights_from_disk" and server.behave == 400:
            return self.send(400, {"success": False, "message": "cannot be read"})
        responses = {
            "/model_info": server.model_info,
            "/server_info": server.server_info,
            "/health": {},
            "/health_generate": {},
        }
        return self.send(200, responses.get(self.path, {"success": True, "message": ""}))

    def generate(self, options):
        shown = {key: options.get(key) for key in ("bootstrap_port", "bootstrap_room")}
        # One write: threads do not share a line.
        os.write(1, f"generate {json.dumps(shown)}\n".encode())
        behave = self.server.behave
        probe = options.get("input_ids") == [0]
        if behave == "hangs" and not probe:
            time.sleep(60)
        if behave == "returns garbage" and not probe:
            return self.send(200, "<html>bad gateway</html>")
        if behave == "hangs up once" and not probe:
            self.server.behave = "well"
            self.close_connection = True
            return None
        if behave == "resets once" and not probe:
            self.server.behave = "well"
            self.close_connection = True
            # Closed with a reset instead of an end of the stream.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
            return None
        if isinstance(behave, int) and not probe:
            return self.send(behave, {"error": {"message": "Requested token count exceeds the context"}})
        version = self.server.model_info["weight_version"]
        if behave == "returns another version" and not probe:
            version = "17"
        count = options["sampling_params"]["max_new_tokens"]
        asked = options.get("input_ids", [])[options.get("logprob_start_len", 0) :] if not count else []
        meta = {
            "input_token_logprobs": [[-0.5, token, None] for token in asked],
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, 3, None]] * count,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": count}],
        }
        return self.send(200, {"text": "", "meta_info": meta})

    def send(self, status, content):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main():
    options = json.loads(sys.stdin.buffer.readline())
    for gate in (word.removeprefix("gate=") for word in sys.argv[1:] if word.startswith("gate=")):
        while not os.path.exists(gate):
            time.sleep(0.01)
    print("loading", options["model_path"], flush=True)
    shown = {key: options.get(key) for key in ("disaggregation_mode", "disaggregation_bootstrap_port")}
    print("options", json.dumps(shown), flush=True)
    if "dies" in options["model_path"]:
        sys.exit("no kernel image is available")
    if "kills" in options["model_path"]:
        # In SGLang a process reports the error, and the main process kills all of them.
        print(DEATH, flush=True)
        os.killpg(0, signal.SIGKILL)
    if "hangs" in options["model_path"]:
        time.sleep(60)
    if "squatted" in options["model_path"]:
        # SGLang logs this, and does not end.
        print("error while attempting to bind on address ('127.0.0.1', 1): address already in use", flush=True)
        time.sleep(60)
    behave = "starves" if "starves" in options["model_path"] else "well"
    FakeSglang({}, token=options["api_key"], port=options["port"], behave=behave).serve_forever()


if __name__ == "__main__":
    main()
