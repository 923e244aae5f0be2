"""Serves a folder's model by transformers and peft: serve_script.py MODEL STATE [name=value ...]. Prints its address."""

from __future__ import annotations

import sys
from pathlib import Path

from peft_models import PeftModels
from slime_tinker.serve import serve
from slime_tinker.settings import Settings

from slime_core.registry import Registry
from slime_serving.listener import listen, shown

if __name__ == "__main__":
    model, state, name, port = sys.argv[1:]
    listener = listen("127.0.0.1", int(port), backlog=4096)
    serve(
        PeftModels(Path(model), name),
        Settings(state=Path(state), save_after_s=1.0),
        Registry.from_environment(),
        listener=listener,
        keys=None,
        tls=None,
        ready=lambda: print(shown(listener, "127.0.0.1"), flush=True),
    )
