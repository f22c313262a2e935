"""A small Qwen2 with random weights, as a checkpoint on disk: everything runs, and the text is noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tp.checkpoint import save_checkpoint
from tp.config import ModelConfig, RopeConfig
from tp.models import CausalLM, initialise_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|endoftext|>"
TOKENS = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1)), "Ċ", END]
"""A token for each printable ASCII character, in the spelling of byte-level tokenizers: Ġ is a space, Ċ a newline."""


def write_random_checkpoint(directory: Path) -> None:
    """Writes it in the Hub's layout. Its 9 query heads divide by few degrees, like those of SmolLM2-135M."""
    config = ModelConfig(
        model_type="qwen2",
        hidden_size=144,
        num_layers=4,
        num_attention_heads=9,
        num_kv_heads=3,
        head_dim=16,
        intermediate_size=416,
        vocab_size=len(TOKENS),
        max_position_embeddings=2048,
        rope=RopeConfig(),
        qkv_bias=True,
    )
    model = CausalLM(config)
    initialise_parameters(model, seed=0, std=0.2)  # wide enough for it not to repeat one character
    save_checkpoint(model, directory, character_tokenizer())


def character_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer with a token for each character, of the kind that transformers expects of a Qwen2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
