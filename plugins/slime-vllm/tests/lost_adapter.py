"""A server with an adapter that is lost. It takes two starts of vLLM, so this is run by hand:
pytest plugins/slime-vllm/tests/lost_adapter.py"""

from carried_run import slime, write_run
from test_replaced_server import VANDAL, require_replaced
from vllm_setup import PYTHON


def test_a_run_continues_with_another_server_that_gets_the_adapter(model, tmp_path):
    (tmp_path / "vandal.py").write_text(VANDAL)
    write_run(tmp_path, model)
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace('"math"', '"random"'))
    words = ["--engine", "vllm", "--vllm-python", str(PYTHON), "--plugin", "vandal.py"]
    require_replaced(slime(tmp_path, *words, "--lora-rank", "4", "--transport", "adapter"))
