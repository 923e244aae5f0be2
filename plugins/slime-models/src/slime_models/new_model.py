"""Small models with random weights and a character tokenizer: for examples, tests and first steps without downloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slime_core.errors import ModelError, unknown_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from slime_models.model_presets import Preset

PAD: Final = "<pad>"
END: Final = "<end>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The numbers that make a model small."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    max_length: int = 512
    tie_word_embeddings: bool = False
    """The embedding of a token is also what its logit is read with: copying is learnt for all tokens at once."""


def new_model(
    folder: Path,
    architecture: str,
    sizes: ModelSizes,
    *,
    alphabet: str,
    tokens: Sequence[str] = (),
    chat_template: str | None = None,
    seed: int = 0,
    initializer_range: float = 0.02,
) -> int:
    """Writes config, weights (float32) and tokenizer into `folder`; returns the parameter count.

    ModelError if the folder exists or the architecture is unknown.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.logging import disable_progress_bar

    if folder.exists():
        raise ModelError(f"{folder}: exists already. Remove it, or give another name.")
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            unknown_name(
                "--architecture", architecture, "causal architecture", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            )
        )
    tokenizer = character_tokenizer(alphabet, tokens)
    tokenizer.chat_template = chat_template
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.hidden_size // sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=sizes.max_length,
        tie_word_embeddings=sizes.tie_word_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def new_preset(folder: Path, preset: Preset, *, alphabet: str, tokens: Sequence[str] = (), seed: int = 0) -> int:
    """Writes a public model's shape with random bfloat16 weights, and a tokenizer that uses the first of its token ids."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if folder.exists():
        raise ModelError(f"{folder}: exists already. Remove it, or give another name.")
    tokenizer = character_tokenizer(alphabet, tokens)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(preset.architecture, **preset.fields, **ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def character_tokenizer(alphabet: str, tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet`, one for each of `tokens` (longest match first), and PAD and END."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [PAD, END, *sorted(tokens, key=len, reverse=True), *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=PAD))
    longer = "|".join(map(escaped, sorted(tokens, key=len, reverse=True)))
    pattern = f"{longer}|[\\s\\S]" if longer else "[\\s\\S]"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def escaped(text: str) -> str:
    """For the tokenizers library's regular expressions."""
    return "".join(f"\\{character}" if not character.isalnum() else character for character in text)
