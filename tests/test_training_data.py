"""Files to documents to token ids to batches: what is learned, from what, and that nothing is lost or doubled."""

from __future__ import annotations

import errno
import itertools
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from tp.errors import CapacityError, RequestError
from tp.parallel import TensorParallelGroup
from tp.training import IGNORE_INDEX
from tp.training.data import (
    Conversation,
    DocumentEncoder,
    EncodedDocument,
    EvaluationBatches,
    PackedBatches,
    PlainText,
    PromptAndCompletion,
    TokenizedDataset,
    read_documents,
    split_documents,
    tokenize_files,
    train_tokenizer,
)
from tp.training.data.order import shuffled
from tp.training.data.storage import open_dataset

CORPUS = Path(__file__).parent.parent / "benchmarks" / "data" / "king-james-bible.txt"
ALONE = TensorParallelGroup.alone()
END = 256


class ByteTokenizer:
    """A token a byte, and an end token; what of a transformers tokenizer is used where there is no template."""

    eos_token_id: int | None = END
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.texts_encoded = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        self.texts_encoded += len(texts)
        return {"input_ids": [self.encode(text) for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {str(index): index for index in range(END + 1)}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


# Reading


def test_documents_of_a_text_file_are_what_stands_between_separator_lines(tmp_path: Path) -> None:
    content = "\ufeffone\n\nto\n<|document|>\n \n<|document|>\r\n\ttwo <|document|>\u2028\n <|document|>\n\n"
    content += "<|document|>\nthree\r\n"
    path = write(tmp_path / "a.txt", content)
    assert list(read_documents([path])) == [
        PlainText("one\n\nto", f"{path}, line 1"),
        PlainText("\ttwo <|document|>\u2028\n <|document|>\n", f"{path}, line 7"),
        PlainText("three", f"{path}, line 11"),
    ]
    assert [d.text for d in read_documents([path, write(tmp_path / "b.md", "x\n---\ny")], "---")][1:] == ["x", "y"]


def test_a_text_file_without_separators_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\n\ntwo\n")
    assert list(read_documents([path])) == [PlainText("one\n\n\ntwo", f"{path}, line 1")]


def test_jsonl_has_three_shapes(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "mood": 1}]
    path = jsonl(
        tmp_path / "a.jsonl",
        {"text": "a\u2028b\n", "id": 7},
        {"text": ""},
        {"prompt": "", "completion": "c"},
        {"messages": messages},
    )
    assert list(read_documents([path])) == [
        PlainText("a\u2028b\n", f"{path}, line 1"),
        PromptAndCompletion("", "c", f"{path}, line 3"),
        Conversation(tuple(messages), f"{path}, line 4"),
    ]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"text": "a"', "not valid JSON: Expecting"),
        ("[" * 100_000, "not valid JSON"),
        ('["text"]', "holds a list, not a JSON object"),
        ('{"txt": "a"}', "it has 'txt'"),
        ("{}", "it has no fields"),
        ('{"text": "a", "prompt": "b"}', "it has 'text', 'prompt'"),
        ('{"text": 5}', '"text" is 5, not a string'),
        ('{"text": "\\ud800"}', '"text" holds half of a surrogate pair'),
        ('{"prompt": "a"}', '"completion" is missing'),
        ('{"prompt": "a", "completion": ""}', '"completion" is empty'),
        ('{"messages": "a"}', '"messages" must be a list of objects'),
        ('{"messages": [{"role": "assistant"}]}', 'message 1: "content" is missing'),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'no message has the role "assistant"'),
        (b'{"text": "a\xff"}', "byte 12 of the line (0xff) is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    good = b'{"text": "good"}\n\n'
    path = write(tmp_path / "a.jsonl", good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    documents = read_documents([path])
    assert next(documents) == PlainText("good", f"{path}, line 1")
    with pytest.raises(RequestError) as raised:
        next(documents)
    assert str(raised.value).startswith(f"{path}, line 3: ")
    assert complaint in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path / "absent.txt", "cannot be read: No such file"),
        (tmp_path / "a.parquet", "its name must end in one of .txt"),
        (write(tmp_path / "a.txt", b"\n\xe9\n"), "line 2: byte 1 of the line (0xe9)"),
    ):
        with pytest.raises(RequestError) as raised:
            list(read_documents([path]))
        assert str(path) in str(raised.value) and complaint in str(raised.value)


def test_a_line_without_end_is_not_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp.training.data.documents.LONGEST_LINE", 8)
    path = write(tmp_path / "a.txt", b"8 bytes\n" + b"more than 8\n")
    with pytest.raises(RequestError, match="line 2: a line of more than 8 bytes: divide it"):
        list(read_documents([path]))


# Encoding

TEXTS = ["the cat sat on the mat and the dog sat on the cat", "there is the other mat, there!"]
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_MARKS = CHATML.replace(
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n",
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}",
)
# Writes no token that ends an answer, and neither spaces nor brackets hold the turns apart.
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# As reasoning models': what an answer was thought out with is dropped once another turn follows.
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{{ message['content'] if loop.last else message['content'].split('|')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TURNS = [("user", "the cat"), ("assistant", "sat"), ("user", "the dog"), ("assistant", "on the mat"), ("user", "and")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = train_tokenizer(TEXTS * 3, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture
def beginning(tokenizer: Any) -> Any:
    """A tokenizer that itself writes something before a text and something after it."""
    from tokenizers import processors

    own = train_tokenizer(TEXTS * 3, 300)
    own.add_special_tokens({"bos_token": "<s>"})
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>",
        special_tokens=[("<s>", own.bos_token_id), ("<|endoftext|>", own.eos_token_id)],
    )
    assert own.decode(own.encode("the")) == "<s>the<|endoftext|>"
    return own


def conversation(turns: list[tuple[str, str]], place: str = "a.jsonl, line 3") -> Conversation:
    return Conversation(tuple({"role": role, "content": content} for role, content in turns), place)


def whole_and_learned(tokenizer: Any, document: Any, **options: Any) -> tuple[str, list[str]]:
    """The text of all ids, and of each run of learned ones."""
    encoded = DocumentEncoder(tokenizer, **options).encode(document)
    assert len(encoded.token_ids) == len(encoded.learned)
    edges = [0, *(np.flatnonzero(np.diff(encoded.learned)) + 1).tolist(), len(encoded.learned)]
    runs = [slice(start, stop) for start, stop in itertools.pairwise(edges) if encoded.learned[start]]
    return tokenizer.decode(encoded.token_ids), [tokenizer.decode(encoded.token_ids[run]) for run in runs]


def test_a_text_that_is_too_long_for_the_memory_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp.training.data.encoding.free_host_memory", lambda: 2**20)
    encoder = DocumentEncoder(tokenizer)
    encoder.encode(PlainText("x" * 4000))
    with pytest.raises(
        CapacityError, match="^b.txt: to tokenize a text of 5000 characters takes about 1 MiB, 1 MiB is"
    ):
        encoder.encode(PlainText("x" * 5000, "b.txt"))


def test_text_is_learned_whole_and_ended_once(tokenizer: Any) -> None:
    for text in ("the cat", "the cat<|endoftext|>"):
        whole = "the cat<|endoftext|>"
        assert whole_and_learned(tokenizer, PlainText(text)) == (whole, [whole])
    assert whole_and_learned(tokenizer, PlainText("it"), eos_token_ids=[5, 0])[0] == "it" + tokenizer.decode([5])
    tokenizer_without_end = ByteTokenizer()
    tokenizer_without_end.eos_token_id = None
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        DocumentEncoder(tokenizer_without_end)
    assert DocumentEncoder(tokenizer_without_end, [9]).encode(PlainText("a")).token_ids == [97, 9]


def test_text_begins_as_the_tokenizer_has_it_and_once(beginning: Any) -> None:
    whole = "<s>the cat<|endoftext|>"
    for text in ("the cat", "<s>the cat"):
        assert whole_and_learned(beginning, PlainText(text)) == (whole, [whole])
        split = PromptAndCompletion(text.removesuffix(" cat"), " cat")
        assert whole_and_learned(beginning, split) == (whole, [" cat<|endoftext|>"])


def test_the_loss_of_a_completion_begins_where_the_prompt_ends(tokenizer: Any) -> None:
    document = PromptAndCompletion("the", "re is")
    assert len(tokenizer.encode("there")) == 1, "else the two do not grow together, and this tests nothing"
    assert whole_and_learned(tokenizer, document) == ("there is<|endoftext|>", ["re is<|endoftext|>"])
    encoded = DocumentEncoder(tokenizer).encode(document)
    assert encoded.token_ids[: len(tokenizer.encode("the"))] == tokenizer.encode("the"), "as at inference"
    assert encoded.num_bytes == 5
    ended = PromptAndCompletion("the<|endoftext|>", "mat")
    assert whole_and_learned(tokenizer, ended) == ("the<|endoftext|>mat<|endoftext|>", ["mat<|endoftext|>"])


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKS])
@pytest.mark.parametrize("turns", [TURNS, TURNS[:4], [("system", "Be brief."), *TURNS]])
def test_only_the_answers_of_a_conversation_are_learned(
    tokenizer: Any, template: str, turns: list[tuple[str, str]]
) -> None:
    """Up to the token that ends them, but not the line break that the template puts after it."""
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    document = conversation(turns)
    encoded = DocumentEncoder(tokenizer, [0, end]).encode(document)
    assert encoded.token_ids == tokenizer.apply_chat_template(list(document.messages), return_dict=False)
    assert whole_and_learned(tokenizer, document, eos_token_ids=[0, end])[1] == [
        "sat<|im_end|>",
        "on the mat<|im_end|>",
    ]
    assert encoded.num_bytes == len("sat" + "on the mat")


def test_a_template_that_marks_the_answers_has_the_last_word(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML_WITH_MARKS.replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole, learned = whole_and_learned(tokenizer, conversation(TURNS[:4]), eos_token_ids=[end])
    assert learned == ["sat", "on the mat"] and whole.endswith("on the mat<|im_end|>\n")
    document = conversation(TURNS[:4])
    encoded = DocumentEncoder(tokenizer, [end]).encode(document)
    theirs = tokenizer.apply_chat_template(list(document.messages), return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.token_ids == theirs["input_ids"] and encoded.learned == [m == 1 for m in theirs["assistant_masks"]]


def test_what_a_model_is_prompted_with_is_what_it_was_trained_on(tokenizer: Any) -> None:
    from tp.generation.chat import encode_chat

    tokenizer.chat_template = CHATML
    prompt = encode_chat(tokenizer, list(conversation(TURNS[:3]).messages))
    encoded = DocumentEncoder(tokenizer).encode(conversation(TURNS[:4]))
    assert encoded.token_ids[: len(prompt)] == prompt
    assert encoded.learned[len(prompt)] and not encoded.learned[len(prompt) - 1]


def test_an_answer_that_the_template_does_not_end_is_ended(tokenizer: Any) -> None:
    tokenizer.chat_template = BARE
    turns = [("user", "the"), ("assistant", "re")]
    assert whole_and_learned(tokenizer, conversation(turns)) == ("there<|endoftext|>", ["re<|endoftext|>"])
    again = [("user", "it"), ("assistant", "is<|endoftext|>"), *turns]
    assert whole_and_learned(tokenizer, conversation(again))[1] == ["is<|endoftext|>", "re<|endoftext|>"]
    unanswered = [*turns, ("user", "on")]
    assert whole_and_learned(tokenizer, conversation(unanswered)) == ("thereon", ["re"])
    tokenizer.chat_template = CHATML  # whose <|im_end|> is no end-of-sequence token to this tokenizer
    whole, learned = whole_and_learned(tokenizer, conversation(TURNS[:2]))
    assert whole.endswith("sat<|im_end|>\n<|endoftext|>") and learned == ["sat<|im_end|>\n<|endoftext|>"]


def test_what_a_template_cannot_do_is_a_clear_error(tokenizer: Any) -> None:
    encoder = DocumentEncoder(tokenizer)
    tokenizer.chat_template = FORGETFUL
    assert whole_and_learned(tokenizer, conversation([("user", "a"), ("assistant", "b|c")]))[1] == ["b|c<|endoftext|>"]
    for template, turns, complaint in (
        (FORGETFUL, [("user", "a"), ("assistant", "b|c"), ("user", "d")], "before message 3 otherwise once that joins"),
        (CHATML, [("assistant", "a"), ("user", "b")], "the assistant's message comes first"),
        ("{{ raise_exception('no such role') }}", TURNS, "chat template refuses these messages: no such role"),
        ("{% generation %}{{ 2 ** 9 }}{% endgeneration %}", TURNS, "it computes powers"),
        ("{{ messages[0]['content'] }}", TURNS, "leaves no token of an answer to learn"),
        (None, TURNS, "this tokenizer has none"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(RequestError) as raised:
            encoder.encode(conversation(turns))
        assert str(raised.value).startswith("a.jsonl, line 3: ") and complaint in str(raised.value)


def test_encoding_keeps_the_order_of_documents(tokenizer: Any) -> None:
    documents = [
        PlainText("the"),
        PlainText("cat"),
        PromptAndCompletion("the ", "dog"),
        PlainText("mat"),
        PromptAndCompletion("on", " it"),
    ]
    encoder = DocumentEncoder(tokenizer)
    with mock.patch("tp.training.data.encoding.BATCH_CHARACTERS", 6):
        assert list(encoder.encode_all(documents)) == [encoder.encode(document) for document in documents]


# A tokenizer of one's own


def test_a_trained_tokenizer_encodes_any_text_and_is_read_by_transformers(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    own = train_tokenizer(TEXTS * 3, 280, "<end>")
    assert len(own) == 280 and own.eos_token_id == 0 and own.eos_token == "<end>"
    own.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat", " \t\n\n  x ", "žluťoučký 🐈 \x00\ufffd", "the <end> of it", " ,.!"):
        assert own.decode(own.encode(text)) == again.decode(again.encode(text)) == text
        assert own.encode(text) == again.encode(text)
    assert len(own.encode("the cat sat")) < 6
    assert again.backend_tokenizer.to_str() == train_tokenizer(TEXTS * 3, 280, "<end>").backend_tokenizer.to_str()
    with pytest.raises(RequestError, match="a vocabulary of 1000000000 is more than 4194304 tokens"):
        train_tokenizer(TEXTS, 10**9)
    with pytest.raises(RequestError, match="256 is too small"):
        train_tokenizer(TEXTS, 256)


# Batches

Documents = list[list[int]]
# Eleven documents, 50 tokens, all different.
SIZES = (7, 1, 4, 9, 2, 5, 3, 8, 1, 4, 6)


def numbered_documents(sizes: tuple[int, ...] = SIZES) -> TokenizedDataset:
    stops = np.cumsum(sizes)
    return dataset_of([list(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)])


def dataset_of(documents: Documents, learned: list[list[bool]] | None = None) -> TokenizedDataset:
    masks = learned or [[True] * len(ids) for ids in documents]
    return TokenizedDataset.of_documents(
        EncodedDocument(ids, mask, 10 * len(ids), ids[0]) for ids, mask in zip(documents, masks, strict=True)
    )


def rows(batch: Any) -> tuple[list[int], list[int], tuple[int, ...]]:
    assert batch.token_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.token_ids.shape == batch.labels.shape
    return batch.token_ids.tolist(), batch.labels.tolist(), batch.sequence_lengths


def test_labels_of_documents_made_by_hand() -> None:
    """One document, so that its order is known; then its rows with a mask."""
    ids = [5, 6, 7, 8, 9]
    across = PackedBatches(dataset_of([ids]), 2, 2)
    assert rows(across.batch(0)) == ([5, 6, 7, 8], [6, 7, 8, 9], (2, 2))
    assert rows(across.batch(1)) == ([9, 5, 6, 7], [5, 6, 7, 8], (2, 2)), "the second epoch follows without a seam"
    apart = PackedBatches(dataset_of([ids]), 2, 2, attend_across_documents=False)
    assert rows(apart.batch(0)) == rows(across.batch(0)), "the last token of a row predicts the first of the next"
    assert rows(apart.batch(1)) == ([9, 5, 6, 7], [IGNORE_INDEX, 6, 7, 8], (1, 1, 2))
    masked = PackedBatches(dataset_of([ids], [[False, False, True, False, True]]), 3, 1)
    assert rows(masked.batch(0)) == ([5, 6, 7], [IGNORE_INDEX, 7, IGNORE_INDEX], (3,))
    assert masked.batch(0).num_labels == 1
    step = apart.batch(1).step(dropout_seed=3)
    assert step.positions().tolist() == [0, 0, 0, 1] and step.dropout_seed == 3


def test_documents_follow_one_another_in_the_shuffled_order() -> None:
    documents = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    order = shuffled(4, 8, 0).tolist()
    assert order != [0, 1, 2, 3]
    stream = [token for index in order for token in documents[index]]
    first_tokens = {ids[0] for ids in documents}
    across = PackedBatches(dataset_of(documents), 9, 1, seed=8).batch(0)
    assert rows(across) == (stream[:9], stream[1:], (9,))
    apart = PackedBatches(dataset_of(documents), 9, 1, seed=8, attend_across_documents=False).batch(0)
    assert apart.token_ids.tolist() == stream[:9]
    assert apart.labels.tolist() == [IGNORE_INDEX if token in first_tokens else token for token in stream[1:]]
    lengths = [len(documents[index]) for index in order]
    assert lengths[-1] > 1
    assert apart.sequence_lengths == (*lengths[:-1], lengths[-1] - 1)


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("length, size", [(7, 1), (3, 5), (70, 2)])
def test_every_token_is_predicted_once_an_epoch(across: bool, length: int, size: int) -> None:
    dataset = numbered_documents()
    total = dataset.num_tokens
    batches = PackedBatches(dataset, length, size, seed=1, attend_across_documents=across)
    epochs = length * size  # that many epochs are as many tokens as `total` batches
    assert batches.epochs_before(total) == epochs
    inputs: Counter[int] = Counter()
    labels: Counter[int] = Counter()
    for index in range(total):
        batch = batches.batch(index)
        assert sum(batch.sequence_lengths) == length * size == len(batch.token_ids)
        inputs.update(batch.token_ids.tolist())
        labels.update(batch.labels.tolist())
    firsts = {int(start) for start in dataset.starts}
    assert inputs == dict.fromkeys(range(total), epochs)
    ignored = labels.pop(IGNORE_INDEX, 0)
    if across:  # the very first token of the stream follows nothing; the one after the last row has its turn instead
        expected = Counter(inputs)
        expected[int(batches.batch(0).token_ids[0])] -= 1
        expected[int(batches.batch(total).token_ids[0])] += 1
        assert labels == expected and ignored == 0
    else:
        assert labels == {token: epochs for token in range(total) if token not in firsts}
        assert ignored == len(firsts) * epochs


def test_each_epoch_has_an_order_of_its_own_and_every_document_whole() -> None:
    dataset = numbered_documents()
    batches = PackedBatches(dataset, dataset.num_tokens, 1, seed=3)
    epochs = [batches.batch(epoch).token_ids.tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for epoch in epochs:
        for index in range(dataset.num_documents):
            ids = dataset.read(index)[0].tolist()
            at = epoch.index(ids[0])
            assert epoch[at : at + len(ids)] == ids
    other = PackedBatches(dataset, dataset.num_tokens, 1, seed=4)
    assert other.batch(0).token_ids.tolist() != epochs[0]


def test_orders_are_those_of_earlier_versions() -> None:
    """A run that resumes goes on in the order that it began in."""
    assert shuffled(8, 0, 0).tolist() == [2, 6, 5, 3, 0, 4, 7, 1]
    assert shuffled(8, 0, 1).tolist() == [3, 2, 7, 5, 4, 1, 6, 0]
    assert shuffled(8, 1, 0).tolist() == [7, 1, 0, 3, 5, 6, 4, 2]
    positions = np.array([np.argsort(shuffled(5, seed, 2)) for seed in range(2000)])
    counts = np.array([np.bincount(column, minlength=5) for column in positions.T])
    assert abs(counts - 400).max() < 100, "every document comes to every place equally often"


def test_a_batch_depends_on_its_index_alone() -> None:
    dataset = numbered_documents()
    one = PackedBatches(dataset, 7, 3, seed=5)
    in_order = [rows(one.batch(index)) for index in range(12)]
    backwards = [rows(one.batch(index)) for index in reversed(range(12))]
    assert backwards[::-1] == in_order
    assert [rows(PackedBatches(dataset, 7, 3, seed=5).batch(index)) for index in range(12)] == in_order


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("dp, micro_batches", [(2, 1), (3, 2), (2, 3)])
def test_data_parallel_ranks_share_what_one_rank_reads(across: bool, dp: int, micro_batches: int) -> None:
    dataset = numbered_documents()
    options: dict[str, Any] = {"seed": 2, "attend_across_documents": across}
    alone = PackedBatches(dataset, 6, 2, **options)
    ranks = [PackedBatches(dataset, 6, 2, data_parallel_rank=r, data_parallel_size=dp, **options) for r in range(dp)]
    for step in range(4):
        theirs = [ranks[r].batch(step * micro_batches + m) for m in range(micro_batches) for r in range(dp)]
        together = micro_batches * dp
        ours = [alone.batch(step * together + m) for m in range(together)]
        assert list(map(rows, theirs)) == list(map(rows, ours))
        assert ranks[0].epochs_before(step * micro_batches) == alone.epochs_before(step * together)


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("length, size", [(6, 2), (49, 1), (7, 1), (100, 2)])
def test_evaluation_reads_every_row_once(across: bool, dp: int, length: int, size: int) -> None:
    dataset = numbered_documents()
    ranks = [
        EvaluationBatches(
            dataset, length, size, data_parallel_rank=r, data_parallel_size=dp, attend_across_documents=across
        )
        for r in range(dp)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    read = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    firsts = set(dataset.starts.tolist())
    real = [batch for batch in read if batch.num_labels or len(batch.token_ids) > 1]
    assert [token for batch in real for token in batch.token_ids.tolist()] == list(range(49))
    assert [token for batch in real for token in batch.labels.tolist()] == [
        token if across or token not in firsts else IGNORE_INDEX for token in range(1, 50)
    ]
    for batch in read[len(real) :]:
        assert rows(batch) == ([0], [IGNORE_INDEX], (1,))
    if across:
        lengths = [length for batch in real for length in batch.sequence_lengths]
        assert lengths == [length] * (49 // length) + [49 % length] * (49 % length > 0)
    with pytest.raises(IndexError):
        ranks[0][len(ranks[0])]


def test_batches_that_cannot_be_are_refused() -> None:
    dataset = numbered_documents()
    for arguments, options, complaint in (
        ((0, 1), {}, "rows of 0 tokens, 1 a batch"),
        ((4, 0), {}, "rows of 4 tokens, 0 a batch"),
        ((4, 1), {"data_parallel_rank": 2, "data_parallel_size": 2}, "data-parallel rank 2 of 2"),
    ):
        for kind in (PackedBatches, EvaluationBatches):
            with pytest.raises(RequestError, match=complaint):
                kind(dataset, *arguments, **options)
    with pytest.raises(RequestError, match="1 tokens: there is nothing to predict"):
        PackedBatches(dataset_of([[4]]), 3, 1)


# Held-out documents


def contents(dataset: TokenizedDataset) -> list[tuple[int, ...]]:
    return [tuple(dataset.read(index)[0].tolist()) for index in range(dataset.num_documents)]


def texts(documents: list[Any]) -> list[str]:
    return [document.text for document in documents]


@pytest.mark.parametrize("fraction, count", [(0.01, 1), (0.1, 1), (0.5, 2), (0.6, 3), (0.99, 4)])
def test_no_document_is_in_both_parts(fraction: float, count: int) -> None:
    documents = [
        PlainText(text, f"line {line}") for line, text in enumerate(["ab", "c", "ab", "de", "fgh", "c", "c", "i"])
    ]
    for seed in range(20):
        training, held_out = split_documents(documents, fraction, seed)
        assert len(held_out) == len(set(texts(held_out))) == count
        assert texts(training) == [text for text in texts(documents) if text not in texts(held_out)]
        assert held_out == sorted(held_out, key=documents.index)
    assert len({frozenset(texts(split_documents(documents, fraction, seed)[1])) for seed in range(20)}) > 3


def test_a_dataset_is_divided_as_its_documents_are(tokenizer: Any) -> None:
    documents = [
        *(PlainText(text) for text in ("the", "cat", "the", "mat", "dog", "it")),
        PromptAndCompletion("the", "cat"),
        PromptAndCompletion("the", "mat"),
        PromptAndCompletion("thec", "at"),
    ]
    training, held_out = split_documents(documents, 0.5, 3)
    for encoder in (DocumentEncoder(tokenizer), DocumentEncoder(ByteTokenizer())):
        dataset = TokenizedDataset.of_documents(encoder.encode_all(documents))
        parts = dataset.split(0.5, 3)
        for part, expected in zip(parts, (training, held_out), strict=True):
            encoded = list(encoder.encode_all(expected))
            assert contents(part) == [tuple(document.token_ids) for document in encoded]
            assert part.num_bytes == sum(document.num_bytes for document in encoded)
            assert part.num_tokens == sum(len(document.token_ids) for document in encoded)
            assert [documents[number] for number in part.document_numbers] == expected


def test_which_documents_are_held_out_does_not_depend_on_the_others() -> None:
    documents = [PlainText(f"number {number}", f"line {number}") for number in range(400)]
    training, held_out = split_documents(documents, 0.1, 1)
    assert (len(training), len(held_out)) == (360, 40)
    elsewhere = [PlainText(document.text, "another file") for document in reversed(documents)]
    assert texts(split_documents(elsewhere, 0.1, 1)[1]) == texts(held_out)[::-1]
    assert set(texts(split_documents(documents, 0.2, 1)[1])) > set(texts(held_out))
    half = set(texts(split_documents(documents[:200], 0.5, 1)[1]))
    assert len(half & set(texts(split_documents(documents, 0.5, 1)[1]))) > 85, "of 100; 50 by chance"


def test_documents_are_told_apart_by_all_their_content() -> None:
    documents = [
        PlainText("abc"),
        PromptAndCompletion("a", "bc"),
        PromptAndCompletion("ab", "c"),
        conversation([("user", "a"), ("assistant", "bc")]),
        conversation([("assistant", "a"), ("user", "bc")]),
        conversation([("user", "a")]),
    ]
    assert len({document.fingerprint() for document in documents}) == 6
    assert PlainText("abc", "line 1").fingerprint() == PlainText("abc", "line 2").fingerprint()
    swapped = [Conversation(({"a": 1, "b": 2},)), Conversation(({"b": 2, "a": 1},))]
    assert len({document.fingerprint() for document in swapped}) == 1


def test_a_division_that_cannot_be_is_refused() -> None:
    for fraction in (0.0, 1.0):
        with pytest.raises(RequestError, match="held-out fraction"):
            numbered_documents().split(fraction)
    with pytest.raises(RequestError, match=r"^the data is one document, 3 times: put a line <\|document\|> "):
        split_documents([PlainText("a")] * 3, 0.5)


# The cache


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    text = write(tmp_path / "a.txt", "one\n<|document|>\ntwö")
    return [text, jsonl(tmp_path / "b.jsonl", {"prompt": "a", "completion": "bc"})]


def tokenized(paths: list[Path], cache: Path, **options: Any) -> TokenizedDataset:
    return tokenize_files(paths, options.pop("tokenizer", ByteTokenizer()), ALONE, cache_directory=cache, **options)


EXPECTED = [(*b"one", END), (*"twö".encode(), END), (*b"abc", END)]


def test_files_are_tokenized_once(files: list[Path], tmp_path: Path) -> None:
    cache, tokenizer = tmp_path / "deep" / "cache", ByteTokenizer()
    reports: list[tuple[int, int]] = []
    first = tokenized(files, cache, tokenizer=tokenizer, progress=lambda done, total: reports.append((done, total)))
    total = sum(path.stat().st_size for path in files)
    assert reports[-1] == (total, total) and reports == sorted(reports)
    assert contents(first) == EXPECTED
    assert first.read(2)[1].tolist() == [False, True, True, True]
    assert (first.num_documents, first.num_tokens, first.num_bytes, first.highest_token_id) == (3, 13, 9, END)
    assert isinstance(first.token_ids, np.memmap) and first.token_ids.dtype == np.dtype("<u2")
    assert tokenizer.texts_encoded == 2
    files[0] = files[0].rename(tmp_path / "renamed.txt")
    again = tokenized(files, cache, tokenizer=tokenizer)
    assert tokenizer.texts_encoded == 2, "found in the cache, whatever the file is called"
    assert contents(again) == EXPECTED
    assert len(list(cache.iterdir())) == 1, "and nothing else lies about"
    mapped = PackedBatches(again, 4, 2, seed=1)
    masks = [[True] * 4, [True] * 5, [False, True, True, True]]
    in_memory = PackedBatches(dataset_of(list(map(list, EXPECTED)), masks), 4, 2, seed=1)
    assert [rows(mapped.batch(index)) for index in range(9)] == [rows(in_memory.batch(index)) for index in range(9)]


def test_progress_is_reported_a_hundred_times_and_to_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "line\n" * 1717)
    reports: list[tuple[int, int]] = []
    tokenized([path], tmp_path / "cache", progress=lambda done, total: reports.append((done, total)))
    assert 90 <= len(reports) <= 102
    assert reports == sorted(reports) and reports[-1] == (5 * 1717, 5 * 1717)


def test_ids_of_large_vocabularies_take_four_bytes(files: list[Path], tmp_path: Path) -> None:
    dataset = tokenized(files, tmp_path / "cache", eos_token_ids=[70_000])
    assert dataset.token_ids.dtype == np.dtype("<u4")
    assert dataset.highest_token_id == 70_000 == contents(dataset)[0][-1]


def test_whatever_changes_the_tokens_makes_a_new_entry(files: list[Path], tmp_path: Path, tokenizer: Any) -> None:
    cache = tmp_path / "cache"

    def entries(*paths: Path, **options: Any) -> int:
        tokenized(list(paths), cache, **options)
        return len(list(cache.iterdir()))

    a, b = files
    tokenizer.chat_template = CHATML
    assert entries(a, b) == 1
    assert entries(b, a) == 2
    assert entries(a, b, separator="one") == 3
    assert entries(a, b, eos_token_ids=[7]) == 4
    assert entries(a, b, eos_token_ids=[7, 8]) == 5
    assert entries(a, b, tokenizer=tokenizer) == 6
    tokenizer.chat_template = CHATML_WITH_MARKS
    assert entries(a, b, tokenizer=tokenizer) == 7
    assert entries(a, b, tokenizer=train_tokenizer(TEXTS, 290)) == 8
    tokenizer("the cat", truncation=True, max_length=1)
    assert entries(a, b, tokenizer=tokenizer) == 8, "how it was called before does not matter"
    write(a, "one\n<|document|>\ntwo!")
    assert entries(a, b) == 9


def test_a_damaged_entry_is_made_anew(files: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tokenized(files, cache)
    (entry,) = cache.iterdir()
    for name in sorted(path.name for path in entry.iterdir()):
        for damage in (b"", (entry / name).read_bytes()[:-1], None):
            (entry / name).unlink() if damage is None else write(entry / name, damage)
            assert open_dataset(entry) is None
            assert contents(tokenized(files, cache)) == EXPECTED
            assert list(cache.iterdir()) == [entry]


def no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_cache_that_cannot_be_written_is_done_without(files: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for cache in (files[0] / "cache", Path("/proc/cache")):
        with pytest.warns(UserWarning, match="cannot be written .*: this run tokenizes into a temporary directory"):
            dataset = tokenized(files, cache)
        assert contents(dataset) == EXPECTED
        assert list(temporary.iterdir()) == [], "gone, and readable as long as it is mapped"
    with mock.patch("tp.training.data.storage._sync", no_space), pytest.warns(UserWarning, match="No space left"):  # noqa: SIM117
        with pytest.raises(CapacityError, match="either .No space left on device.: name a cache directory"):
            tokenized(files, tmp_path / "cache")
    assert list(temporary.iterdir()) == list((tmp_path / "cache").iterdir()) == []


def test_errors_leave_nothing_behind(files: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    bad = write(tmp_path / "bad.jsonl", '{"text": "a"}\n{"txt": "b"}\n')
    empty = write(tmp_path / "empty.txt", "\n<|document|>\n")
    for paths, complaint in (
        ([*files, bad], "bad.jsonl, line 2: needs"),
        ([empty], "empty.txt: no documents there"),
        ([tmp_path / "absent.txt"], "absent.txt cannot be read"),
        ([], "no files"),
    ):
        with pytest.raises(RequestError, match=complaint):
            tokenized(paths, cache)
        assert list(cache.iterdir()) == []


def _tokenized_together(group: TensorParallelGroup, paths: list[Path], cache: Path) -> tuple[Any, int]:
    tokenizer = ByteTokenizer() if group.rank == 0 else None
    dataset = tokenize_files(paths, tokenizer, group, cache_directory=cache)
    return contents(dataset), tokenizer.texts_encoded if tokenizer else 0


def test_one_rank_tokenizes_for_all(ranks: Any, files: list[Path], tmp_path: Path) -> None:
    for encoded in (2, 0):
        outcomes = ranks(3).run(_tokenized_together, files, tmp_path / "cache")
        assert outcomes == [(EXPECTED, encoded), (EXPECTED, 0), (EXPECTED, 0)]
    assert ranks(2).run(_tokenized_together, files, files[0] / "cache")[1] == (EXPECTED, 0), "in a temporary directory"


def _error_together(group: TensorParallelGroup, paths: list[Path], cache: Path) -> str:
    with pytest.raises(RequestError) as raised:
        _tokenized_together(group, paths, cache)
    return str(raised.value)


def test_a_bad_line_is_every_ranks_error(ranks: Any, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", "{}\n")
    first, second = ranks(2).run(_error_together, [bad], tmp_path / "cache")
    assert first == second and first.startswith(f"{bad}, line 1: ")


class MeetingTokenizer(ByteTokenizer):
    """Waits, in the midst of tokenizing, for another run that is there too."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__()
        self._group = group

    def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
        self._group.communicator.all_gather_object(None)
        return super().__call__(texts, **options)


def _two_runs(group: TensorParallelGroup, paths: list[Path], cache: Path) -> tuple[Any, int]:
    tokenizer = MeetingTokenizer(group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither run gives way to the other
        dataset = tokenize_files(paths, tokenizer, TensorParallelGroup.alone(), cache_directory=cache)
    return contents(dataset), tokenizer.texts_encoded


def test_two_runs_may_make_the_same_entry_at_once(ranks: Any, files: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert ranks(2).run(_two_runs, files, cache) == [(EXPECTED, 2)] * 2
    (entry,) = cache.iterdir()
    assert open_dataset(entry) is not None


# The corpus


def test_the_corpus_is_a_chapter_a_document() -> None:
    assert CORPUS.stat().st_size <= 1_000_000
    texts = [document.text for document in read_documents([CORPUS])]
    assert len(texts) == len(set(texts)) == 358
    assert texts[0].startswith("Genesis 1\nIn the beginning God created the heaven and the earth.\nAnd the earth")
    assert texts[-1].startswith("John 21\n")
    assert all("\n\n" not in text and text == text.strip() and text.isascii() for text in texts)
