"""Files of a model folder: several files of weights with an index, against transformers and huggingface_hub."""

import json

import huggingface_hub
import torch
from safetensors.torch import save_file
from torch import nn

from slime_training.weight_files import (
    checksum_of,
    copy_generation_and_code,
    copy_small_files,
    dtypes_in,
    file_of,
    gather_weights,
)


def test_weights_are_gathered_after_an_interruption(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    parts = [tmp_path / f"{name}.safetensors" for name in tensors]
    for part, (name, tensor) in zip(parts, tensors.items(), strict=True):
        save_file({name: tensor}, part)
    target = tmp_path / "target"
    target.mkdir()
    first = parts[0].rename(target / "model-00001-of-00002.safetensors")

    gather_weights(parts, target)

    assert file_of(target) == {"a": first, "b": target / "model-00002-of-00002.safetensors"}
    assert dtypes_in(target) == {"a": torch.float32, "b": torch.bfloat16}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2, 2))
    huggingface_hub.load_torch_model(model, target, strict=True)
    assert model.a.tolist() == [1] * 3
    assert not model.b.any()


def test_files_copied_beside_weights(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    index = "model.safetensors.index.json"
    for name in (
        "config.json",
        "generation_config.json",
        "modeling.py",
        "model.safetensors",
        "pytorch_model.bin",
        index,
    ):
        (source / name).write_text(name)
    copy_small_files(source, tmp_path / "all")
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == [
        "config.json",
        "generation_config.json",
        "modeling.py",
    ]
    (tmp_path / "saved").mkdir()
    copy_generation_and_code(source, tmp_path / "saved")
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["generation_config.json", "modeling.py"]


def test_a_checksum_depends_on_type_shape_and_bytes():
    tensor = torch.arange(6, dtype=torch.int16)
    others = [tensor.view(torch.bfloat16), tensor.reshape(2, 3), tensor.flip(0)]
    assert len({checksum_of(other) for other in [tensor, *others]}) == 4
    # The checksum is of the content, independent of the memory layout.
    assert checksum_of(tensor.reshape(2, 3).T) == checksum_of(tensor.reshape(2, 3).T.contiguous())
