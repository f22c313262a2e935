"""Documents as token ids, each with whether it is learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tp.checkpoint.free_memory import free_host_memory
from tp.checkpoint.tokenizer import as_checkpoint_error
from tp.errors import CapacityError, RequestError
from tp.training.data.conversations import encode_conversation
from tp.training.data.documents import SEPARATOR, Conversation, Document, PlainText, PromptAndCompletion
from tp.training.data.plain import continue_ids, encode_plain

BYTES_A_CHARACTER = 256
"""Of memory, at most about that many: a tokenizer holds all tokens of a text at once, with their texts and places."""
BATCH_CHARACTERS = 1 << 20
"""Plain texts are handed to the tokenizer together, up to about this many characters."""


@dataclass(frozen=True)
class EncodedDocument:
    """A document as the model reads it.

    Attributes:
        token_ids: with what begins and ends it.
        learned: one a token: whether its prediction enters the loss.
        num_bytes: UTF-8 bytes of the text that is learned (of conversations, of the assistant's contents).
        fingerprint: the document's.
    """

    token_ids: list[int]
    learned: list[bool]
    num_bytes: int
    fingerprint: int


class DocumentEncoder:
    """Encodes documents with one tokenizer.

    Text, and prompts with their completions, begin with the ids that the tokenizer puts before plain text, if it puts
    any, and end with the end-of-sequence id; neither is doubled where the text brings it along. Special tokens that
    are written out in a text are encoded as such. Conversations are the chat template's: `encode_conversation`.

    Args:
        tokenizer: a transformers tokenizer.
        eos_token_ids: ids that end a text; the first is the one that is written. By default the tokenizer's own.

    Raises:
        RequestError: neither the caller nor the tokenizer knows an end-of-sequence id.
        CapacityError: where a text is encoded that is too long for the memory that is free.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        own = tokenizer.eos_token_id
        self.eos_token_ids = tuple(eos_token_ids) or (() if own is None else (own,))
        if not self.eos_token_ids:
            raise RequestError("the tokenizer has no end-of-sequence token: name the ids that end a text")
        self.tokenizer = tokenizer
        self.begin_ids = _ids_before_text(tokenizer)

    def encode_all(self, documents: Iterable[Document]) -> Iterator[EncodedDocument]:
        """Every document in order; neighbouring texts are tokenized together."""
        texts: list[PlainText] = []
        characters = 0
        for document in documents:
            if isinstance(document, PlainText):
                texts.append(document)
                characters += len(document.text)
            if characters >= BATCH_CHARACTERS or not isinstance(document, PlainText):
                yield from self._encode_texts(texts)
                texts, characters = [], 0
            if not isinstance(document, PlainText):
                yield self.encode(document)
        yield from self._encode_texts(texts)

    def encode(self, document: Document) -> EncodedDocument:
        """One document.

        Raises:
            RequestError: a conversation that the chat template cannot render, see `encode_conversation`.
        """
        if isinstance(document, PlainText):
            return next(self._encode_texts([document]))
        if isinstance(document, PromptAndCompletion):
            return self._encode_completion(document)
        return self._encode_conversation(document)

    def _encode_texts(self, documents: list[PlainText]) -> Iterator[EncodedDocument]:
        if documents:
            _check_room(documents)
            texts = [document.text for document in documents]
            with as_checkpoint_error(f"the model's tokenizer fails on a text from {documents[0].place} on"):
                plain_ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for document, plain in zip(documents, plain_ids, strict=True):
                ids = self._ended(self._begun(plain))
                yield EncodedDocument(ids, [True] * len(ids), _utf8_length(document.text), document.fingerprint())

    def _encode_completion(self, document: PromptAndCompletion) -> EncodedDocument:
        prompt = encode_plain(self.tokenizer, document.prompt)
        both = continue_ids(self.tokenizer, prompt, document.prompt, document.prompt + document.completion)
        given = self._begun(prompt)
        ids = given + self._ended(both[len(prompt) :])
        learned = [False] * len(given) + [True] * (len(ids) - len(given))
        return EncodedDocument(ids, learned, _utf8_length(document.completion), document.fingerprint())

    def _encode_conversation(self, document: Conversation) -> EncodedDocument:
        ids, learned = encode_conversation(self.tokenizer, document, self.eos_token_ids)
        answers = [message["content"] for message in document.messages if message["role"] == "assistant"]
        return EncodedDocument(ids, learned, sum(map(_utf8_length, answers)), document.fingerprint())

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self.begin_ids)] == self.begin_ids else self.begin_ids + ids

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] in self.eos_token_ids else [*ids, self.eos_token_ids[0]]


def _check_room(documents: Sequence[PlainText]) -> None:
    needed, free = BYTES_A_CHARACTER * sum(len(document.text) for document in documents), free_host_memory()
    if needed > free:
        longest = max(documents, key=lambda document: len(document.text))
        raise CapacityError(
            f"{longest.place}: to tokenize a text of {len(longest.text)} characters takes about {needed >> 20} MiB, "
            f"{free >> 20} MiB is free: divide it by lines of {SEPARATOR}"
        )


def _ids_before_text(tokenizer: Any) -> list[int]:
    """What the tokenizer writes before a plain text, and nothing of what it may write after it."""
    plain = encode_plain(tokenizer, "a")
    whole: list[int] = tokenizer.encode("a", add_special_tokens=True)
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _utf8_length(text: str) -> int:
    return len(text.encode("utf-8"))
