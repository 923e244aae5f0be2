"""What is no model folder."""

import pytest

from slime_core.errors import ModelError
from slime_training.model_config import config_file_of


def test_where_the_config_is(tmp_path):
    with pytest.raises(ModelError, match=r"absent: no such folder\. Give a Hugging Face model folder"):
        config_file_of(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"it has no config\.json, so"):
        config_file_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert config_file_of(tmp_path) == tmp_path / "config.json"
