"""Tokenizers rebuilt from GGUF metadata, against transformers' own reading of the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.plugins.weight_loaders.gguf.loader import GGUFLoader
from engine.plugins.weight_loaders.gguf.pretokenizers import PRE_TOKENIZERS

TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\n\nand lines\r\n\ttabs ",
    "naïve café — 東京へ行く 🎉🏳️‍🌈 مرحبا",
    "def f(x):\n    return x**2 + 3.14",
    "I'LL SAY CamelCase & snake_case <|end|> done",
    "",
]
CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
}


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a vocabulary that was trained with the rule's own cuts."""
    backend = Tokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def pieces(**extra: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: control tokens, bytes, characters, and words by falling score."""
    words = ["▁t", "he", "▁the", "▁a", "in", "▁in", "▁▁", "er", "▁w", "or", "ld", "▁wor", "▁world", "lo", "ll", "llo"]
    characters = sorted(set("▁thewordlainHfxy,.!0123()") - set(words))
    control = ["<unk>", "<s>", "</s>"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *characters, "<think>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1e6] * len(characters) + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(characters)) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | extra


@pytest.fixture
def write(write_gguf: Callable[..., Path]) -> Callable[[dict[str, Any]], Path]:
    return lambda extra: write_gguf("llama", CONFIG, {}, extra=extra)


def reference(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", sorted(set(PRE_TOKENIZERS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_byte_level_vocabularies_cut_alike(write: Callable[[dict[str, Any]], Path], pre: str) -> None:
    path = write(byte_level(pre))
    ours, theirs = GGUFLoader().tokenizer(path), reference(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_no_rule_loses_text(write: Callable[[dict[str, Any]], Path], pre: str) -> None:
    tokenizer = GGUFLoader().tokenizer(write(byte_level(pre)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_pieces_split_alike(write: Callable[[dict[str, Any]], Path]) -> None:
    path = write(pieces())
    ours, theirs = GGUFLoader().tokenizer(path), reference(path)
    for text in ["Hello the world", "in the  world, 123!", "fox(y) é 東"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text), text
    assert ours.decode(ours.encode("Hello  the 東 world")) == "Hello  the 東 world"


def test_text_after_a_special_token_begins_with_a_space_too(write: Callable[[dict[str, Any]], Path]) -> None:
    """As llama.cpp, whose format this is, and the tokenizers of Llama 2 and TinyLlama have it."""
    tokenizer = GGUFLoader().tokenizer(write(pieces()))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("the<think>world")] == [
        " the",
        "<think>",
        " world",
    ]


def test_pieces_without_a_leading_space(write: Callable[[dict[str, Any]], Path]) -> None:
    tokenizer = GGUFLoader().tokenizer(write(pieces(**{"tokenizer.ggml.add_space_prefix": False})))
    assert tokenizer.token_text(tokenizer.encode("the")[0]) == "t"
    assert tokenizer.decode(tokenizer.encode(" the world")) == " the world"


@pytest.mark.parametrize(("given", "begins"), [(None, True), (True, True), (False, False)])
def test_bos_is_added_as_the_file_says(
    write: Callable[[dict[str, Any]], Path], given: bool | None, begins: bool
) -> None:
    extra = {} if given is None else {"tokenizer.ggml.add_bos_token": given}
    tokenizer = GGUFLoader().tokenizer(write(pieces(**extra)))
    assert (tokenizer.encode("the", add_special_tokens=True)[0] == 1) is begins
    assert tokenizer.encode("the")[0] != 1


def test_templates_and_stop_tokens(write: Callable[[dict[str, Any]], Path]) -> None:
    extra = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools: {{ tools | length }}",
        "tokenizer.ggml.eot_token_id": 7,
    }
    tokenizer = GGUFLoader().tokenizer(write(pieces(**extra)))
    assert tokenizer.eos_token_ids == (2, 7)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat) == "<s>hi"
    assert tokenizer.apply_chat_template(chat, tools=[{"type": "function"}]) == "tools: 1"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, r"holds no tokenizer"),
        (pieces(**{"tokenizer.ggml.model": "bert"}), "kind 'bert'; gpt2 and llama"),
        (pieces(**{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "spiral"}), "rule 'spiral'; known are"),
        ({key: value for key, value in pieces().items() if "scores" not in key}, r"lacks tokenizer\.ggml\.scores"),
    ],
)
def test_unknown_tokenizers_are_refused(
    write: Callable[[dict[str, Any]], Path], extra: dict[str, Any], words: str
) -> None:
    path = write(extra)
    with pytest.raises(ValueError, match=words) as failure:
        GGUFLoader().tokenizer(path)
    assert path.name in str(failure.value)
