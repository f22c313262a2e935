"""Conversations go through the tokenizer's own template: its default system turn, its special tokens, once each."""

from __future__ import annotations

from typing import Any

import pytest

from tp.errors import RequestError
from tp.generation.chat import conversation, encode_chat

# As Qwen2.5's: without a system turn the template writes one of its own.
QWEN_LIKE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2's: the template writes the token that begins a text, and so does the tokenizer before plain text.
LLAMA_LIKE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|begin|>{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_with_and_without_a_system_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN_LIKE
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with_default = "<|im_start|>system\nYou help.<|im_end|>\n" + user
    assert encode_chat(tokenizer, conversation("Hi")) == ids_of(tokenizer, with_default)
    with_own = "<|im_start|>system\nBe brief.<|im_end|>\n" + user
    assert encode_chat(tokenizer, conversation("Hi", "Be brief.")) == ids_of(tokenizer, with_own)
    empty = "<|im_start|>system\n<|im_end|>\n" + user  # an empty system turn is one, not none
    assert encode_chat(tokenizer, conversation("Hi", "")) == ids_of(tokenizer, empty)


def test_special_tokens_are_not_doubled(tokenizer: Any) -> None:
    tokenizer.chat_template = LLAMA_LIKE
    ids = encode_chat(tokenizer, conversation("Hi"))
    begin = tokenizer.convert_tokens_to_ids("<|begin|>")
    assert tokenizer.encode("x")[0] == begin
    assert ids == ids_of(tokenizer, "<|begin|>[Hi]")
    assert ids.count(begin) == 1


def test_what_a_template_cannot_do_is_a_clear_error(tokenizer: Any) -> None:
    tokenizer.chat_template = LLAMA_LIKE
    with pytest.raises(RequestError, match="System role not supported"):
        encode_chat(tokenizer, conversation("Hi", "Be brief."))
    tokenizer.chat_template = "{{ 1 // 0 }}"
    with pytest.raises(RequestError, match="refuses these messages: .*by zero"):
        encode_chat(tokenizer, conversation("Hi"))
    with pytest.raises(RequestError, match="at least one message"):
        encode_chat(tokenizer, [])
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        encode_chat(tokenizer, conversation("Hi"))
