"""Tokenizers and chat templates of directories and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from checkpoint_samples import make_config, make_tensors, write_directory, write_gguf

from tp.checkpoint import open_checkpoint
from tp.errors import CheckpointError
from tp.parallel import TensorParallelGroup

ALONE = TensorParallelGroup.alone()
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
TOKENS = ["<pad>", "<s>", "Ġ", "h", "i", "</s>", "hi", "a", "b"]
MERGES = ["h i"]


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A byte-level vocabulary of a few tokens in the metadata."""
    config = make_config(vocab_size=9)

    def settings(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 1, 1, 1, 3, 1, 1, 1])
        writer.add_token_merges(MERGES)
        writer.add_chat_template(TEMPLATE)

    return write_gguf(tmp_path / "model.gguf", config, make_tensors(config), settings=settings)


def test_a_gguf_file_brings_its_tokenizer_and_template(gguf_path: Path) -> None:
    (gguf_path.parent / "tokenizer.json").write_text("not the tokenizer of this file")
    tokenizer = open_checkpoint(gguf_path, ALONE).tokenizer()
    assert tokenizer("hi <s>ab")["input_ids"] == [6, 2, 1, 7, 8]
    assert tokenizer.decode([6, 2, 7]) == "hi a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 5)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"


@pytest.mark.parametrize("shorter_way_fails", [False, True])
def test_it_is_the_one_that_transformers_builds(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch, shorter_way_fails: bool
) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if shorter_way_fails:
        monkeypatch.setattr(transformers, "PreTrainedTokenizerFast", None)
    ours = open_checkpoint(gguf_path, ALONE).tokenizer()
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_a_directory_brings_its_tokenizer(gguf_path: Path, tmp_path: Path) -> None:
    config = make_config()
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    with pytest.raises(CheckpointError, match="model has no tokenizer: "):
        open_checkpoint(path, ALONE).tokenizer()
    open_checkpoint(gguf_path, ALONE).tokenizer().save_pretrained(path)
    tokenizer = open_checkpoint(path, ALONE).tokenizer()
    assert tokenizer("hi <s>ab")["input_ids"] == [6, 2, 1, 7, 8]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi"


def test_code_of_a_checkpoint_is_not_run(gguf_path: Path, tmp_path: Path) -> None:
    config = make_config()
    path = write_directory(tmp_path / "model", config, make_tensors(config))
    open_checkpoint(gguf_path, ALONE).tokenizer().save_pretrained(path)
    marker = tmp_path / "ran"
    (path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}})
    )
    tokenizer = open_checkpoint(path, ALONE).tokenizer()
    assert tokenizer("hi")["input_ids"] == [6], "read from tokenizer.json, by a class of transformers"
    assert not marker.exists()


def test_a_gguf_file_without_a_tokenizer(tmp_path: Path) -> None:
    config = make_config()
    path = write_gguf(tmp_path / "model.gguf", config, make_tensors(config))  # a list of tokens, but of no known kind
    with pytest.raises(CheckpointError, match="model.gguf has no tokenizer that can be used"):
        open_checkpoint(path, ALONE).tokenizer()
