"""A server that loads new weights in place, as on a GPU: vLLM packs nothing on this CPU. By every transport, and compared. Its
server takes a minute to start, so this is run by hand: pytest plugins/slime-vllm/tests/in_place.py"""

import shutil

import pytest
from served import Served
from test_transports import (
    test_a_broken_folder_leaves_the_old_weights,
    test_a_server_that_holds_other_weights_names_them,
    test_after_a_broken_bucket_nothing_is_served_until_all_are_there,
    test_the_engine_responds_as_transformers_with_the_new_weights,
    test_what_is_not_sent_again_is_not_taken_for_equal,
)
from vllm_setup import PYTHON, setup_for

from slime_plugin_kit.event_loop import BackgroundLoop
from slime_vllm import launching
from slime_vllm.plugin import Vllm

__all__ = [
    "test_a_broken_folder_leaves_the_old_weights",
    "test_a_server_that_holds_other_weights_names_them",
    "test_after_a_broken_bucket_nothing_is_served_until_all_are_there",
    "test_the_engine_responds_as_transformers_with_the_new_weights",
    "test_what_is_not_sent_again_is_not_taken_for_equal",
]

UNPACKED = """

from vllm.model_executor.layers import utils


def unpacked(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = unpacked
print("in place", flush=True)
"""


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """In place of the session's."""
    folder = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=580, health_timeout=5))
    server = shutil.copytree(launching.FOLDER, folder / "server")
    file = server / "slime_vllm_server" / "in_place.py"
    text = file.read_text()
    assert 'device.type == "cuda" and ' in text
    file.write_text(text.replace('device.type == "cuda" and ', "") + UNPACKED)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(launching, "FOLDER", server)
            info = background.run(engine.start(setup_for(model, folder, max_batch=128)))
        assert "in place" in (folder / "logs" / "vllm-0-0.log").read_text()
        yield Served(info, [info.address], model, folder, engine, background)
    finally:
        background.run(engine.stop())
        background.close()
