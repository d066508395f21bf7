"""`engine bench spec` on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.errors import ConfigError
from engine.server.cli.bench_command import command
from engine.testing.tokenizer import EOS, save_byte_tokenizer

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": EOS + 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
PROMPTS = [{"class": "echo", "prompt": "abcabcabc"}, {"class": "other", "prompt": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and prompts of two kinds."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    save_byte_tokenizer(folder)
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return folder


def spec(folder: Path, *arguments: str) -> Result:
    settings = (f"model.source=path:{folder}", "model.loader=dummy", "kv_cache.pages=64", "device.threads=1")
    words = [word for setting in settings for word in ("--set", setting)]
    prompts = ("--prompts", str(folder / "prompts.jsonl"))
    return CliRunner().invoke(command, ["spec", *words, *prompts, "--max-tokens", "24", *arguments])


def test_both_tables_and_the_trace(folder: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    load = ("--batch", "1,2", "--rounds", "1", "--context", "0,100", "--trace", "--json", str(numbers))
    result = spec(folder, "--speculator", "ngram", "--speculator", "suffix", *load)
    assert result.exit_code == 0, result.output
    assert "LENGTH" in result.output
    assert "RATIO" in result.output
    assert "Controller of suffix" in result.output
    told: dict[str, Any] = json.loads(numbers.read_text())
    rows = [(row["speculator"], row["task"], row["context"]) for row in told["acceptance"]]
    assert rows == [(s, t, c) for s in ("ngram", "suffix") for c in (0, 100) for t in ("echo", "other")]
    assert all(0 <= row["accepted"] <= row["drafted"] for row in told["acceptance"])
    assert sum(row["accepted"] for row in told["acceptance"]) > 0  # a tiny random model soon says the same again
    assert [(row["speculator"], row["batch"]) for row in told["speed"]] == [
        ("ngram", 1), ("ngram", 2), ("suffix", 1), ("suffix", 2),
    ]  # fmt: skip
    assert all(len(row["plain"]) == len(row["drafted"]) == 1 for row in told["speed"])


def test_one_table_will_do(folder: Path) -> None:
    result = spec(folder, "--speculator", "ngram", "--only", "acceptance")
    assert "LENGTH" in result.output
    assert "RATIO" not in result.output


def test_it_takes_a_speculator(folder: Path) -> None:
    result = spec(folder)
    assert isinstance(result.exception, ConfigError)
    assert "name one with --speculator" in str(result.exception)


def test_mistakes_are_told(folder: Path, tmp_path: Path) -> None:
    assert "whole numbers from 1 on" in spec(folder, "--batch", "0").output
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"class": "x", "prompt": "y"}\n{"class": 3}\n')
    assert f"line 2 of {bad} is no" in spec(folder, "--prompts", str(bad)).output.replace("\n", " ")
