"""A tokenizer of one's own, for models that begin from nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_TOKEN = "<|endoftext|>"
LARGEST_VOCABULARY = 2**22
"""Tokens, above any model's; the trainer takes memory for all that are asked for."""
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocab_size: int, end_token: str = END_TOKEN) -> PreTrainedTokenizerFast:
    """Byte-pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019), so that any text can be encoded.

    The same texts give the same tokenizer. It writes nothing before or after a text by itself. `save_pretrained` makes
    files that `AutoTokenizer` reads.

    Args:
        texts: what the pairs are counted in: the training part alone, if a held-out part is to be one.
        vocab_size: tokens, the 256 bytes and `end_token` among them. Texts with fewer pairs give fewer.
        end_token: ends a text; id 0.

    Raises:
        RequestError: a vocabulary too small for the bytes, or larger than any.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= _BYTES:
        raise RequestError(f"a vocabulary of {vocab_size} is too small: {_BYTES} bytes and the end token need more")
    if vocab_size > LARGEST_VOCABULARY:
        raise RequestError(f"a vocabulary of {vocab_size} is more than {LARGEST_VOCABULARY} tokens, the most of any")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end_token,
        eos_token=end_token,
        clean_up_tokenization_spaces=False,
    )
