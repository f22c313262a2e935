"""Text as it streams: whole characters only, nothing of a stop string, and in the end exactly what decoding gives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp.generation import GenerationOptions
from tp.generation.incremental_text import IncrementalText, incremental_texts
from tp.generation.sequence_text import SequenceText
from tp.generation.stop_strings import StopStringFilter

SAMPLE = "Naïve 你好，世界 🙂👨‍👩‍👧 x² — «ok» �!"


def byte_level_tokenizer() -> Any:
    """As GPT-2 and Qwen2: a character is up to four tokens; two special tokens and one added that is not."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("ä", "½"), ("ð", "Ł")]  # among them two incomplete characters
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback_tokenizer() -> Any:
    """As Llama 2 and Mistral: rare characters are runs of <0x..>, and the first space of a text is dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcxtoken好", "▁to", "�"]
    model = models.BPE({piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, [], unk_token="<unk>",
                       byte_fallback=True, fuse_unk=True)  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
}


TOKENIZER_OF_BYTES = functools.cache(byte_level_tokenizer)


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    (text,) = incremental_texts(tokenizer, 1)
    assert text is not None
    return [*map(text.push, ids), text.finish()]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def test_no_piece_holds_half_a_character(tokenizer: Any) -> None:
    sample = SAMPLE.replace("�", "")
    ids = tokenizer.encode(sample, add_special_tokens=False)
    assert len(ids) > len(sample)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == decoded(tokenizer, ids) == sample
    assert not any("�" in piece for piece in pieces)
    assert max(map(len, pieces)) < 10  # it streams; nothing waits for the end


def test_pieces_equal_decoding_for_any_ids(tokenizer: Any) -> None:
    size = len(tokenizer)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.one_of(st.integers(0, size + 3), st.sampled_from(tokenizer.encode(SAMPLE)), st.just(size - 1)),
            max_size=60,
        )
    )
    def check(ids: list[int]) -> None:
        assert "".join(pieces_of(tokenizer, ids)) == decoded(tokenizer, ids)

    check()


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("what", ["text", "invalid bytes", "special", "unknown"])
def test_the_cost_of_a_token_does_not_grow(kind: str, what: str) -> None:
    """A window of ids is decoded, however long the text and even if no character is ever complete."""
    tokenizer = TOKENIZERS[kind]()
    first_byte = tokenizer.convert_tokens_to_ids("<0xFF>" if kind == "byte fallback" else "ÿ")
    ids = {
        "text": tokenizer.encode("to 好 x", add_special_tokens=False) * 300,
        "invalid bytes": [first_byte] * 2000,
        "special": [tokenizer.convert_tokens_to_ids("</s>" if kind == "byte fallback" else "<|end|>")] * 2000,
        "unknown": [first_byte, *[len(tokenizer) + 5] * 2000],
    }[what]
    lengths = []

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            text: str = tokenizer.decode(ids, **options)
            return text

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    (text,) = incremental_texts(Counting(), 1)
    assert text is not None
    for token_id in ids:
        text.push(token_id)
    assert max(lengths, default=0) <= 40


@given(st.lists(st.sampled_from("ÿÿä½łx?"), max_size=50))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_ids_without_text_between_the_bytes_of_a_character(pieces: str) -> None:
    """Here "?" stands for an id that the tokenizer does not know and decodes to nothing."""
    tokenizer = TOKENIZER_OF_BYTES()
    ids = [len(tokenizer) if piece == "?" else tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
    text = IncrementalText(lambda ids: decoded(tokenizer, ids))
    assert "".join(map(text.push, ids)) + text.finish() == decoded(tokenizer, ids)


def test_a_space_after_an_id_without_text_is_kept() -> None:
    tokenizer = byte_fallback_tokenizer()
    to, end = tokenizer.convert_tokens_to_ids(["▁to", "</s>"])
    text = IncrementalText(lambda ids: decoded(tokenizer, ids))
    assert [text.push(token_id) for token_id in (to, end, to)] == ["to", "", " to"]


def test_invalid_bytes_are_shown_once_certain() -> None:
    tokenizer = byte_level_tokenizer()
    byte = tokenizer.convert_tokens_to_ids
    text = IncrementalText(lambda ids: decoded(tokenizer, ids))
    # 0xFF begins no character; 0xE4 begins one, which "x" does not continue.
    assert [text.push(byte(token)) for token in "ÿÿäx"] == ["", "�", "�", "�x"]


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = [
        (text.find(string) + len(string), text.find(string)) for string in stop if string in text
    ]  # the first that is complete; of those the longest
    expected = text[: min(ends)[1]] if ends else text
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stop_filter = StopStringFilter(stop)
    shown, stopped = "", False
    for start, end in itertools.pairwise(bounds):
        piece, stopped = stop_filter.push(text[start:end])
        shown += piece
        assert expected.startswith(shown), "something of a stop string was shown"
        if stopped:
            break
    assert stopped == bool(ends)
    assert shown + stop_filter.finish() == expected


def test_only_a_possible_beginning_is_held_back() -> None:
    stop_filter = StopStringFilter(["\n\nQ:"])
    assert stop_filter.push("one\n") == ("one", False)
    assert stop_filter.push("two\n\n") == ("\ntwo", False)
    assert stop_filter.push("Q") == ("", False)
    assert stop_filter.push("!") == ("\n\nQ!", False)
    assert stop_filter.push("\n\nQ: and more") == ("", True)


WORDS = ["", "one", " tw", "o", " three", "STOP", "ST", "OP", "?"]


def shown(options: GenerationOptions, ids: list[int], room: int = 100) -> tuple[str, str | None, int]:
    """Text, finish reason and number of ids that were taken; end id 0."""
    words = IncrementalText(lambda ids: "".join(WORDS[token_id] for token_id in ids))
    sequence = SequenceText(words, options, {0}, room)
    total = ""
    for count, token_id in enumerate(ids, 1):
        piece, reason = sequence.advance(token_id)
        total += piece
        if reason is not None:
            return total, reason, count
    return total, None, len(ids)


@pytest.mark.parametrize(
    "options, ids, expected",
    [
        ({}, [1, 2, 3, 0, 1], ("one two", "stop", 4)),
        ({"max_new_tokens": 2}, [1, 2, 3], ("one tw", "length", 2)),
        ({"stop": ["STOP"]}, [1, 6, 7, 8], ("one", "stop", 3)),
        ({"stop": ["STOP"]}, [1, 6, 0], ("oneST", "stop", 3)),
        ({"stop": ["STOP"], "max_new_tokens": 2}, [1, 6, 7], ("oneST", "length", 2)),
        ({"stop": ["STOP"], "max_new_tokens": 3}, [1, 6, 7], ("one", "stop", 3)),
        ({"stop": ["two", "o t"]}, [1, 2, 3], ("one ", "stop", 3)),
        ({"stop": ["STOP"], "min_new_tokens": 2}, [1, 5, 1], ("one", "stop", 2)),
        ({"stop": ["STOP"], "min_new_tokens": 3}, [5, 1, 8, 5], ("STOPone?", "stop", 4)),
    ],
)
def test_what_ends_a_sequence(options: dict[str, Any], ids: list[int], expected: tuple[str, str, int]) -> None:
    assert shown(GenerationOptions(**options), ids) == expected


def test_the_context_ends_a_sequence() -> None:
    assert shown(GenerationOptions(max_new_tokens=9), [1, 2, 3], room=2) == ("one tw", "length", 2)


def test_a_character_that_never_completes_is_shown_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    (text,) = incremental_texts(tokenizer, 1)
    sequence = SequenceText(text, GenerationOptions(max_new_tokens=2), (), 9)
    first, last = (sequence.advance(tokenizer.convert_tokens_to_ids(token)) for token in ("x", "ð"))
    assert (first, last) == (("x", None), ("�", "length"))
