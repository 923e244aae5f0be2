"""The model folder that a run exports."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from slime_core.cli.training import export_hf


@asynccontextmanager
async def turn():
    yield


def exporting(folder, content):
    """A session whose model is one word."""

    async def call_all(method, aside):
        assert method == "save_hf"
        (aside / "model.safetensors").write_text(content)

    policy = SimpleNamespace(turn=turn, call_all=call_all)
    return SimpleNamespace(
        roles={"actor": policy},
        policy=policy,
        folder=SimpleNamespace(hf=folder / "hf"),
        colocation=SimpleNamespace(train=turn),
        tokenizer=SimpleNamespace(save_pretrained=lambda target: (target / "tokenizer.json").write_text(content)),
        run=SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(hf_checkpoint=str(folder / "source")))),
    )


def test_a_later_export_takes_the_place_of_the_one_before(tmp_path):
    """A failed export is removed: it may be as large as the disk allows."""
    for content in ("first", "second", "third"):
        asyncio.run(export_hf(exporting(tmp_path, content)))
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
        files = {path.name: path.read_text() for path in (tmp_path / "hf").iterdir()}
        assert files == {"model.safetensors": content, "tokenizer.json": content}
