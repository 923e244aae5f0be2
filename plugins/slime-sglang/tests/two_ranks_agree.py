"""One of two ranks, of a trainer and then of a server: `two_ranks_agree.py RANK FOLDER`."""

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slime_core.contracts.transport import SenderSetup
from slime_sglang.server import loading
from slime_transports.folder import MANIFEST, FileEntry, Manifest
from slime_transports.plugin import Disk

rank, run_dir = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{run_dir / 'rendezvous'}", rank=rank, world_size=2)

# Ranks that send nothing wait for one that makes several calls, each of which may take the timeout.
sender = Disk.build_sender(Disk.Config(update_weights_timeout=1))
sender.setup(SenderSetup(rank=rank, world_size=2, device="cpu", model_path=run_dir, run_dir=run_dir, colocated=True))
assert sender._ranks._get_backend(torch.device("cpu")).options._timeout > timedelta(hours=1)
sender.close()

# SGLang's own groups, which cannot be passed in another way.
stage = SimpleNamespace(rank_in_group=0)
sglang = ModuleType("sglang.srt.distributed")
sglang.get_tp_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
sglang.get_pp_group = lambda: stage
sys.modules |= {"sglang": ModuleType("sglang"), "sglang.srt": ModuleType("sglang.srt"), sglang.__name__: sglang}

model = SimpleNamespace(slime_weights_identity="before")
updater = SimpleNamespace(get_model=lambda: model)


def load(name, buckets, loaded=(True, "Succeeded.")):
    folder = run_dir / f"{name}-{rank}"
    folder.mkdir()
    manifest = Manifest(version=2, identity="after", buckets=buckets)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return loading.load_from_disk(lambda *args, **kwargs: loaded, updater, str(folder), "safetensors")


missing = FileEntry(file="missing.safetensors", names=("a",), checksum="0", nbytes=4)
assert load("whole", ()) == (True, "Succeeded.")
assert model.slime_weights_identity == "after"
# Only the second rank cannot read it: both report the failure, and the first one does not count as updated.
loaded, message = load("damaged", (missing,) if rank else ())
assert not loaded
assert "bucket 0 of version 2" in message
assert "cannot be read" in message
assert model.slime_weights_identity == ("after" if rank else None)
# The first rank alone.
loaded, message = load("refused", (), (rank == 1, "no room" if rank == 0 else "Succeeded."))
assert (loaded, message) == (False, "no room")
# SGLang reports no failure of a later stage.
stage.rank_in_group = 1
with pytest.raises(RuntimeError, match="pipeline stage 1 has not loaded the weights: "):
    load("stage", (missing,) if rank else ())
dist.destroy_process_group()
