"""What is fuzzed: for each kind of input a sample, how it is damaged, how it is read, and what it must then be.

A target's `attempt` damages a copy of its sample and reads it. It returns where the input was read to the right values,
raises a typed error where it was refused, and raises `AssertionError` where it was read to wrong ones. The right values
are those that the format's own reader (safetensors, gguf, json, numpy) finds in the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoint_samples import load, make_config, make_tensors, whole_tensors, write_directory, write_gguf
from mutations import HOSTILE_INTEGERS, mutated_bytes, mutated_json
from safetensors import SafetensorError, safe_open
from tiny_models import ROPE_PARAMETERS, TINY_CONFIGS, hub_config

from tp.errors import RequestError, TensorParallelError
from tp.parallel import TensorParallelGroup

ALONE = TensorParallelGroup.alone()
GROUPED = {"llama": make_config("llama", num_layers=1), "qwen2": make_config("qwen2", num_layers=1)}


class Target:
    """One kind of input.

    Args:
        directory: the target's own, empty.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def attempt(self, draw: random.Random) -> None:
        raise NotImplementedError


class Safetensors(Target):
    """model.safetensors: damaged header, or damaged values."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config = GROUPED["qwen2"]
        self.model = write_directory(directory / "model", config, make_tensors(config))
        self.file = self.model / "model.safetensors"
        self.content = self.file.read_bytes()
        self.length = int.from_bytes(self.content[:8], "little")
        self.header = json.loads(self.content[8 : 8 + self.length])

    def attempt(self, draw: random.Random) -> None:
        if draw.random() < 0.6:
            header = mutated_json(self.header, draw)
            data = len(header).to_bytes(8, "little") + header + self.content[8 + self.length :]
        else:
            data = mutated_bytes(self.content, draw, 8 + self.length)
        self.file.write_bytes(data)
        model, _ = load(self.model, ALONE)
        try:
            with safe_open(self.file, "pt") as theirs:
                for name, tensor in whole_tensors([model]).items():
                    expected = theirs.get_tensor(name).float()
                    assert torch.equal(tensor.view(torch.int32), expected.view(torch.int32)), name
        except SafetensorError as error:
            raise AssertionError(f"read, but the format's own library refuses it: {error}") from error


class Index(Target):
    """model.safetensors.index.json of three files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config = GROUPED["qwen2"]
        self.tensors = make_tensors(config)
        self.model = write_directory(directory / "model", config, self.tensors, num_files=3)
        self.file = self.model / "model.safetensors.index.json"
        self.content = json.loads(self.file.read_text())

    def attempt(self, draw: random.Random) -> None:
        self.file.write_bytes(mutated_json(self.content, draw))
        model, _ = load(self.model, ALONE)
        for name, tensor in whole_tensors([model]).items():
            assert torch.equal(tensor, self.tensors[name]), name


class Gguf(Target):
    """A GGUF file of two architectures, in part quantised."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = directory / "model.gguf"
        self.contents = []
        for config in GROUPED.values():
            tensors = make_tensors(config)
            kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name in tensors if ".mlp." in name or "q_proj" in name}
            self.contents.append(write_gguf(self.file, config, tensors, kinds=kinds).read_bytes())

    def attempt(self, draw: random.Random) -> None:
        content = draw.choice(self.contents)
        self.file.write_bytes(mutated_bytes(content, draw, content.index(b"token_embd.weight") + 900))
        model, _ = load(self.file, ALONE)
        theirs = gguf.GGUFReader(self.file)
        architecture = theirs.fields["general.architecture"].contents()
        config = model.config
        for key, ours in {
            "context_length": config.max_position_embeddings,
            "rope.freq_base": config.rope.rope_theta,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.head_count": config.num_attention_heads,
        }.items():
            if field := theirs.fields.get(f"{architecture}.{key}"):
                assert field.contents() == ours, key
        ours_by_name = whole_tensors([model])
        for tensor in theirs.tensors:
            name = _hub_name(tensor.name)
            values = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type))).float()
            if architecture == "llama" and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
                heads = config.num_attention_heads if ".attn_q." in tensor.name else config.num_kv_heads
                shape = values.shape
                values = values.reshape(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
            if name in ours_by_name:
                same = torch.equal(ours_by_name[name].view(torch.int32), values.contiguous().view(torch.int32))
                assert same, tensor.name


def _hub_name(name: str) -> str:
    from tp.checkpoint.gguf_names import hub_name

    return hub_name(name) or name


class Config(Target):
    """config.json of every family and rope type, and generation_config.json."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.file = directory / "config.json"
        self.contents = [
            hub_config(family, rope_parameters=rope, eos_token_id=[5, 3], bos_token_id=1, attention_dropout=0.1)
            for family in TINY_CONFIGS
            for rope in ROPE_PARAMETERS.values()
        ]
        self.contents += [
            hub_config("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1, dtype="bfloat16"),
            {**hub_config("llama"), "model_type": "tp_decoder", "norm_placement": "post", "gated_mlp": False},
        ]

    def attempt(self, draw: random.Random) -> None:
        from tp.checkpoint.settings import read_model_config
        from tp.config import ModelConfig
        from tp.models import CausalLM

        content = draw.choice(self.contents)
        self.file.write_bytes(mutated_json(content, draw))
        config = read_model_config(str(self.directory))
        given = json.loads(self.file.read_text())
        for name, attribute in _CONFIG_ATTRIBUTES.items():
            if given.get(name) is not None:
                ours = getattr(config, attribute)
                assert ours == given[name] and type(ours) is type(given[name]), (name, given[name], ours)
        assert ModelConfig.from_hf(config.to_hf()) == config
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf(), allow_nan=False))) == config
        if config.num_layers <= 4:
            CausalLM(config, device="meta")


_CONFIG_ATTRIBUTES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "norm_placement": "norm_placement",
    "gated_mlp": "gated_mlp",
    "bos_token_id": "bos_token_id",
}


class Tokenizer(Target):
    """tokenizer.json and tokenizer_config.json."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Backend(models.BPE(vocab={"<s>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4}, merges=[("h", "i")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>")
        made.chat_template = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
        made.save_pretrained(directory)
        self.contents = {
            name: json.loads((directory / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")
        }

    def attempt(self, draw: random.Random) -> None:
        from tp.checkpoint.tokenizer import tokenizer_of_directory
        from tp.generation.chat import conversation, encode_chat

        damaged = draw.choice(list(self.contents))
        for name, content in self.contents.items():
            data = mutated_json(content, draw) if name == damaged else json.dumps(content).encode()
            (self.directory / name).write_bytes(data)
        tokenizer = tokenizer_of_directory(self.directory)
        if getattr(tokenizer, "chat_template", None):
            encode_chat(tokenizer, conversation("hi"))


class TrainingState(Target):
    """A training checkpoint: run.json, the optimiser's moments, and the directory's name."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from launch.training_recipe import RECIPE, Recipe
        from tp.training.optimizer import optimizer_state
        from tp.training.store import CheckpointStore

        self.model, self.optimizer = self._fresh()
        generator = torch.Generator().manual_seed(1)
        for moment in optimizer_state(self.model, self.optimizer):
            moment.tensor.copy_(torch.randn(moment.tensor.shape, generator=generator))
        run = {RECIPE: Recipe(steps=7, warmup_steps=1).to_json(), "data": "0" * 16, "dtype": "float32"}
        self.store = CheckpointStore(directory / "run")
        self.saved = self.store.save(3, self.model, self.optimizer, None, run)
        self.run = json.loads((self.saved / "training" / "run.json").read_text())
        self.moments = (self.saved / "training" / "optimizer.safetensors").read_bytes()
        self.length = int.from_bytes(self.moments[:8], "little")
        self.header = json.loads(self.moments[8 : 8 + self.length])

    def attempt(self, draw: random.Random) -> None:
        from launch.training_check import saved_run
        from launch.training_recipe import RECIPE, Recipe
        from launch.training_setup import compute_dtype
        from tp.training.optimizer import optimizer_state

        run, moments = json.dumps(self.run).encode(), self.moments
        if draw.random() < 0.5:
            run = mutated_json(self.run, draw)
        elif draw.random() < 0.6:
            header = mutated_json(self.header, draw)
            moments = len(header).to_bytes(8, "little") + header + moments[8 + self.length :]
        else:
            moments = mutated_bytes(moments, draw, 8 + self.length)
        (self.saved / "training" / "run.json").write_bytes(run)
        (self.saved / "training" / "optimizer.safetensors").write_bytes(moments)
        beside = self.store.directory / draw.choice(("step-²", "step-x", "step-", "step-0000000001x", "other"))
        beside.mkdir(exist_ok=True)
        try:
            arguments = argparse.Namespace(
                **{field.name: None for field in fields(Recipe)}, output=self.store.directory, resume=True, dtype=None
            )
            saved = saved_run(arguments)
            assert saved is not None
            recipe = Recipe.of(arguments, saved[RECIPE])
            compute_dtype(arguments, saved, torch.device("cpu"))
            model, optimizer = self._fresh()
            self.store.load(3, model, optimizer)
        finally:
            beside.rmdir()
        recipe.schedule()(1)
        assert isinstance(recipe.batch_size, int) and isinstance(recipe.isolate_documents, bool)
        with safe_open(self.saved / "training" / "optimizer.safetensors", "pt") as theirs:
            for moment in optimizer_state(model, optimizer):
                for part in moment.parts:
                    own, expected = moment.slice_of(part).contiguous(), theirs.get_tensor(part.name)
                    assert torch.equal(own.view(torch.int32), expected.view(torch.int32)), part.name

    @staticmethod
    def _fresh() -> tuple[Any, torch.optim.AdamW]:
        from tp.models import CausalLM, initialise_parameters
        from tp.training.optimizer import adamw

        config = make_config("llama", num_layers=1, hidden_size=24, head_dim=4, intermediate_size=20)
        model = CausalLM(config)
        initialise_parameters(model, seed=1)
        return model, adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class Dataset(Target):
    """The four files of a tokenized dataset."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from tp.training.data.encoding import EncodedDocument
        from tp.training.data.storage import write_dataset

        self.data = directory / "data"
        documents = [EncodedDocument([n % 90 + 1, 2, 3][: n % 3 + 1], [True] * (n % 3 + 1), 5, n) for n in range(40)]
        assert write_dataset(self.data, documents, 97)
        self.contents = {path.name: path.read_bytes() for path in self.data.iterdir()}

    def attempt(self, draw: random.Random) -> None:
        from tp.training.data.storage import open_dataset

        damaged = draw.choice(list(self.contents))
        for name, content in self.contents.items():
            if name == damaged:
                as_json = name == "meta.json" and draw.random() < 0.7
                content = mutated_json(json.loads(content), draw) if as_json else mutated_bytes(content, draw, 200)
            (self.data / name).write_bytes(content)
        dataset = open_dataset(self.data)
        if dataset is None:
            raise RequestError("damaged: it is tokenized again")
        ids = np.frombuffer((self.data / "token_ids.bin").read_bytes(), dtype="<u2").astype(np.int64)
        read = [dataset.read(index)[0] for index in range(dataset.num_documents)]
        assert np.array_equal(np.concatenate(read), ids)
        assert all(int(part.max()) <= dataset.highest_token_id for part in read)
        assert dataset.num_bytes >= 0


class Documents(Target):
    """Text and JSONL files to train on."""

    LINES = (
        {"text": "été au bord"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    )

    def attempt(self, draw: random.Random) -> None:
        from tp.training.data.documents import PlainText, read_documents

        if draw.random() < 0.7:
            path = self.directory / "data.jsonl"
            lines = [json.dumps(line).encode() for line in self.LINES]
            damaged = draw.randrange(len(lines))
            lines[damaged] = mutated_json(self.LINES[damaged], draw)
            path.write_bytes(b"\n".join(lines))
        else:
            path = self.directory / "data.txt"
            path.write_bytes(mutated_bytes("été\n<|document|>\nau bord\n".encode() * 4, draw, 100))
        found = list(read_documents([path]))
        assert all(isinstance(document.fingerprint(), int) for document in found)
        if path.suffix == ".txt":
            text = path.read_bytes().decode()
            assert all(document.text in text for document in found if isinstance(document, PlainText))


class Profile(Target):
    """A hardware profile, planned with."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from tp.planning.hardware import PROFILES

        self.contents = [json.loads(path.read_text()) for path in sorted(PROFILES.glob("*.json"))]
        measured = {
            "operation": "all_reduce",
            "ranks": 2,
            "method": "measured",
            "line": {"latency_s": 1e-5, "ramp_s": 1e-9, "s_per_byte": 1e-11},
        }
        self.contents[0]["fabric"]["measured"] = [measured]
        self.config = make_config("llama")

    def attempt(self, draw: random.Random) -> None:
        from launch.planning.content import serving_content, training_content
        from launch.planning.degrees import usual_degrees
        from tp.planning.hardware import load_profile
        from tp.planning.plan import Workload, plan_serving, plan_training
        from tp.planning.precision import Precision

        path = self.directory / "profile.json"
        path.write_bytes(mutated_json(draw.choice(self.contents), draw))
        profile = load_profile(str(path))
        workload = Workload(
            self.config, Precision.of("bfloat16"), profile, nodes=draw.choice((1, 2)), batch=3, context=100
        )
        degrees = usual_degrees(workload)
        for plans, content in (
            ([plan_serving(workload, degree) for degree in degrees], serving_content),
            ([plan_training(workload, degree) for degree in degrees], training_content),
        ):
            text = json.dumps(content("model", workload, plans), allow_nan=False)  # type: ignore[operator]
            assert "-" not in json.dumps([plan.tp_size for plan in plans]) and text


class Results(Target):
    """A file of `bench --json`, gone on with."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from launch.benching.results_file import ResultsFile
        from launch.benching.rows import Collectives, Limit, Row
        from launch.benching.sweep import OWN, Case, Form
        from launch.measurement.spread import Spread

        spread = Spread.of([1.0, 2.0, 4.0])
        self.about = {
            "date": "2020-01-01", "version": "0", "model": "m", "weights": "random", "config": "0", "threads": 2,
            "runs": 3, "warm_ups": 1, "device": "cpu", "backend": "auto", "packages": {"torch": "2"},
            "machine": {"cpu": "c", "cores": 2, "cpu_capability": "AVX", "devices": [], "platform": "p"},
        }  # fmt: skip
        cases = [Case("strong", "decode", "bfloat16", 1, 8, 4), Case("strong", "train", "float32", 2, 8, 0)]
        forms = [Form(OWN, 1, 2, 2), Form(OWN, 2, 1, 2, "sharded")]
        self.expected = dict.fromkeys(cases, forms)
        self.file = directory / "rows.json"
        results = ResultsFile(self.file, self.about, resumes=False)
        for case in cases:
            rows = []
            for form in forms:
                limit = Limit("memory", spread, spread) if case.phase == "decode" else None
                collectives = Collectives(spread, spread, spread, 4, 100, 2, 50) if form.tp_size > 1 else None
                rows.append(Row(case, form, 1, 8, spread, spread, spread, spread, collectives, limit))
            results.put(rows)
        results.add_failure("own tp=2", "decode", "it died")
        self.lines = [json.loads(line) for line in self.file.read_text().splitlines()]

    def attempt(self, draw: random.Random) -> None:
        from launch.benching.results_file import ResultsFile, complete_cases
        from launch.benching.table import markdown

        lines = [json.dumps(line).encode() for line in self.lines]
        damaged = draw.randrange(len(lines))
        lines[damaged] = mutated_json(self.lines[damaged], draw)
        self.file.write_bytes(b"\n".join(lines) + draw.choice((b"\n", b"")))
        file = ResultsFile(self.file, self.about, resumes=True)
        complete_cases(file.rows, self.expected)
        markdown(self.about, file.rows, [])
        assert len(file.rows) <= len(self.lines)


class CommandLine(Target):
    """The arguments of every command, in this process; nothing that needs a GPU, ranks or weights comes to run."""

    COMMANDS = ("generate", "score", "inspect", "train", "bench", "convert", "plan", "run", "dance", "")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from launch import ranks
        from launch.__main__ import build_parser

        ranks.start = lambda *given, **options: 0  # type: ignore[assignment]
        parser = build_parser()
        (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        self.options = {
            name: [action for action in command._actions if action.option_strings and action.dest != "help"]
            for name, command in commands.choices.items()
        }
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text(json.dumps(hub_config("qwen2")))
        (directory / "data.txt").write_text("a text\n")
        (directory / "script.py").write_text("")

    def attempt(self, draw: random.Random) -> None:
        from launch.__main__ import main

        command = draw.choice(self.COMMANDS)
        argv = [command, *self._base(command, draw)] if command else []
        for action in draw.sample(self.options.get(command, []), min(3, len(self.options.get(command, [])))):
            if action.dest == "calibrate":
                continue
            argv.append(draw.choice(action.option_strings))
            if action.nargs != 0:
                argv.append(self._value(action, draw))
        out, err, held = io.StringIO(), io.StringIO(), sys.stdin
        sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(argv)
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            sys.stdin = held
            for left in ("out", "plots"):
                shutil.rmtree(self.directory / left, ignore_errors=True)
        said = err.getvalue()
        assert "Traceback" not in said or "--debug" in argv, f"{argv}\n{said}"
        if status:
            told = said.rpartition("error: ")[2]
            assert "error: " in said and 0 < len(told) < 3000 and told.count("\n") <= 3, f"{argv}: {said}"
            raise TensorParallelError(told.strip())

    def _base(self, command: str, draw: random.Random) -> list[str]:
        """Options with which the command gets as far as looking at the damaged ones."""
        model = ["--model", str(self.directory / "model")]
        output = ["--output", str(self.directory / "out")]
        return {
            "generate": [*model, "--prompt", "a", "--tp", draw.choice("12")],
            "score": [*model, "--text", "a", "--tp", draw.choice("12")],
            "inspect": [*model, "--prompt", "a", "--tp", draw.choice("12")],
            "train": [*model, "--data", str(self.directory / "data.txt"), "--tp", "2", *output],
            "bench": [*model, "--tp", "1", "--phases", "none" if draw.random() < 0.5 else "decode"],
            "convert": [*model, *output],
            "plan": [*model, "--hardware", "h100"],
            "run": ["--nproc", "2", str(self.directory / "script.py")],
        }.get(command, [])

    def _value(self, action: argparse.Action, draw: random.Random) -> str:
        if action.choices and draw.random() < 0.7:
            return str(draw.choice(list(action.choices)))
        texts = (
            "", " ", "-", "--", "1,2", "1-4", "4-1", "1-999999999999", "1,999999999999", "0x10", "１２", "1_0", "²",
            "nan", "inf", "-inf", "1e999", "1e-320", "0.0", "-1", "/", "/dev/null", "/dev/null/at/all",
            "~", "~nobody/x", "x" * 300, "x" * 5000, "a/" * 2000,
            "\udcff", "\x1b[31m", "h:1", ":::", "h:999999", "h:-1", "[::1]:5",
            "9" * 5000, "{}", "[" * 2000, str(self.directory), str(self.directory / "out"),
            str(self.directory / "data.txt"), str(self.directory / "model" / "config.json"),
        )  # fmt: skip
        return draw.choice(texts) if draw.random() < 0.6 else str(draw.choice((*HOSTILE_INTEGERS, -1, 10**30)))


TARGETS: dict[str, Callable[[Path], Target]] = {
    "safetensors": Safetensors,
    "index": Index,
    "gguf": Gguf,
    "config": Config,
    "tokenizer": Tokenizer,
    "training_state": TrainingState,
    "dataset": Dataset,
    "documents": Documents,
    "profile": Profile,
    "results": Results,
    "command_line": CommandLine,
}
