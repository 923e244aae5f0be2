"""FakeServer: takes weights by SGLang's HTTP calls, and holds no model. For tests of transports."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import torch

from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_transports.flattened_bucket import flatten
from slime_transports.folder import DamagedWeights
from slime_transports.in_process_server import InProcessServer
from slime_transports.receiver import GroupPlace

PLAIN: Final = ("torch", "types", "functools", "collections")


class Restricted(pickle.Unpickler):
    """SGLang's restricted unpickler: refuses classes that are not torch's or plain."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("builtins", "getattr") and module.partition(".")[0] not in PLAIN:
            raise EngineError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class FakeServer:
    """The state behind the HTTP calls. `receive`: called with each bucket as it was sent, with whole tensors."""

    def __init__(self, receive: Callable[[Bucket], None]) -> None:
        self.calls: list[str] = []
        """Paths, in order."""
        self.server_info: Mapping[str, Any] = {}
        """Its response to /server_info."""
        self.server = InProcessServer(receive)
        self.groups = self.server.groups

    def respond(self, path: str, body: Mapping[str, Any]) -> str:
        """Handles a call, and returns its message. Raises EngineError or DamagedWeights to refuse it."""
        self.calls.append(path)
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "/weights_checker": self._check,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/update_weights_from_distributed": self._broadcast,
            "/update_weights_from_tensor": self._tensor,
            "/update_weights_from_disk": self._disk,
        }
        if path not in handlers:
            raise EngineError(f"the fake server has no {path}")
        handlers[path](body)
        return "Success."

    def _check(self, body: Mapping[str, Any]) -> None:
        if body["action"] != "slime_loading":
            raise EngineError(f"Unsupported action={body['action']!r}")

    def _join(self, body: Mapping[str, Any]) -> None:
        name = body["group_name"]
        if name in self.groups:
            raise EngineError(f"group {name} exists already")
        place = GroupPlace(
            name=name,
            address=body["master_address"],
            port=body["master_port"],
            backend="gloo",
            first_rank=body["rank_offset"],
            size=body["world_size"],
        )
        self.server.join(place)

    def _leave(self, body: Mapping[str, Any]) -> None:
        if self.groups.pop(body["group_name"], None) is None:
            raise EngineError("The group to be destroyed does not exist.")

    def _broadcast(self, body: Mapping[str, Any]) -> None:
        tensors = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype)))
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        self.server.take_broadcast(body["group_name"], flatten(tensors, index=0, last=False), version_in(body))

    def _tensor(self, body: Mapping[str, Any]) -> None:
        found = Restricted(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0]))).load()
        flat = found["flattened_tensor"]
        tensors = {
            meta.name: flat[meta.start_idx : meta.end_idx].clone().view(meta.dtype).view(meta.shape)
            for meta in found["metadata"]
        }
        self.server.take(tensors, version_in(body))

    def _disk(self, body: Mapping[str, Any]) -> None:
        self.server.load_folder(Path(body["model_path"]), int(body["weight_version"]))


def version_in(body: Mapping[str, Any]) -> int | None:
    """Only the last bucket has one."""
    version = body.get("weight_version")
    return None if version is None else int(version)


@contextmanager
def serve_partner(partner: FakeServer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are sent separately: with Nagle the body would wait 40 ms until the head is acknowledged.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            content = json.dumps(partner.server_info).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, message = 200, partner.respond(self.path, body)
            except (EngineError, DamagedWeights, RuntimeError, struct.error) as error:
                status, message = 400, f"{type(error).__name__}: {error}"
            content = json.dumps({"success": status == 200, "message": message}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            # The client may have disconnected.
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
