import subprocess
import sys


def test_listing_imports_nothing_heavy_and_extras_are_named() -> None:
    code = """
import sys
from slime_rm_hub.plugin import IfBench
print([m for m in ("torch", "aiohttp", "numpy", "nltk") if m in sys.modules])
sys.modules["if_verifiable"] = None
from slime_core.errors import PluginError
try:
    IfBench.build(IfBench.Config())
except PluginError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("[]\n")
    assert "pip install 'slime-rm-hub[ifbench]'" in run.stdout
