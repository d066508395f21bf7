"""The tokenizer around a folder's files: special tokens, templates by name, bytes of tokens, bad files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.checkpoint import folder_config, gguf_file, read_json, served_name
from engine.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def backend() -> Backend:
    """Bytes as tokens, ids in the order of the alphabet, then <s>, </s> and the ordinary added token <think>."""
    made = Backend(models.BPE(vocab={char: index for index, char in enumerate(ALPHABET)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


BOS, EOS, THINK = 256, 257, 258
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    return tmp_path


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_round_trip(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("héllo</s><think>")
    assert len(ids) == 6 + 2
    assert ids[-2:] == [EOS, THINK]
    assert tokenizer.decode(ids) == "héllo<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "héllo</s><think>"


def test_other_threads_run_while_a_long_text_is_encoded(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    work = threading.Thread(target=tokenizer.encode, args=("a" * 300_000,))
    work.start()
    turns = 0
    while work.is_alive():
        turns += 1  # hardly any if the encoding thread holds the interpreter
        time.sleep(0)
    assert turns > 100


def test_facts(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (BOS, (EOS,), 259)
    assert tokenizer.special_ids == {BOS, EOS}


def test_bytes_and_texts_of_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    first, second = tokenizer.encode("é")
    assert (tokenizer.token_bytes(first), tokenizer.token_bytes(second)) == (b"\xc3", b"\xa9")
    assert tokenizer.token_text(first) == "�"
    assert tokenizer.token_text(tokenizer.encode(" ")[0]) == " "
    assert tokenizer.token_bytes(THINK) == b"<think>"
    assert tokenizer.token_bytes(9999) == b""


def test_stop_tokens_are_those_of_generation(folder: Path) -> None:
    write(folder, "config.json", eos_token_id=1)
    assert Tokenizer.from_folder(folder).eos_token_ids == (1,)
    write(folder, "generation_config.json", eos_token_id=[2, 3])
    assert Tokenizer.from_folder(folder).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("setting", "appended", "expected"),
    [(None, True, True), (None, False, False), (True, False, True), (True, True, True), (False, True, False)],
)
def test_bos_follows_the_setting_and_else_the_backend(
    folder: Path, setting: bool | None, appended: bool, expected: bool
) -> None:
    made = backend()
    if appended:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", bos_token="<s>", **({} if setting is None else {"add_bos_token": setting}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.encode("a", add_special_tokens=True)[0] == BOS) is expected
    assert tokenizer.encode("a")[0] != BOS
    assert tokenizer.encode("<s>a", add_special_tokens=True)[:1] == [BOS], "what the prompt spells stays"


def test_templates_come_from_settings_and_files(folder: Path) -> None:
    assert not Tokenizer.from_folder(folder).has_chat_template
    with pytest.raises(ValueError, match=r"no chat template; set model\.chat_template"):
        Tokenizer.from_folder(folder).apply_chat_template(CHAT)
    named = [{"name": "default", "template": "one {{ bos_token }}"}, {"name": "tool_use", "template": "two"}]
    write(folder, "tokenizer_config.json", bos_token="<s>", chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(CHAT) == "one <s>"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"type": "function"}]) == "two"
    assert tokenizer.apply_chat_template(CHAT, template="tool_use") == "two"
    assert tokenizer.apply_chat_template(CHAT, template="{{ extra }}", extra=5) == "5"
    (folder / "chat_template.jinja").write_text("three")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("four")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template(CHAT) == "three"
    assert tokenizer.apply_chat_template(CHAT, template="rag") == "four"


def test_a_lone_special_template_is_not_the_default(folder: Path) -> None:
    write(folder, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ValueError, match="no default chat template; it has rag"):
        Tokenizer.from_folder(folder).apply_chat_template(CHAT)


def test_old_template_file_is_read(folder: Path) -> None:
    write(folder, "chat_template.json", chat_template="old")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "old"


def test_bad_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object, not list"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; AutoTokenizer"):
        Tokenizer.from_folder(folder)


def test_config_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        folder_config(tmp_path)
    write(tmp_path, "config.json", eos_token_id=1, hidden_size=4)
    write(tmp_path, "generation_config.json", temperature=0.5)
    assert folder_config(tmp_path) == {"eos_token_id": 1, "hidden_size": 4, "_name_or_path": str(tmp_path)}
    assert read_json(tmp_path / "generation_config.json") == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("/m/Qwen2.5-0.5B-Q4_K_M.gguf", "qwen2.5-0.5b"),
        ("/m/tiny-F16.gguf", "tiny"),
        ("/m/tiny.gguf", "tiny"),
        ("/m/Llama-3.1-8B/", "llama-3.1-8b"),
        ("/m/Model-FP8", "model"),
    ],
)
def test_names_for_clients(path: str, name: str) -> None:
    assert served_name(Path(path)) == name


def test_the_gguf_file_of_a_folder(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    file = tmp_path / "a.gguf"
    file.touch()
    assert gguf_file(tmp_path) == gguf_file(file) == file
    write(tmp_path, "config.json")
    assert gguf_file(tmp_path) is None
    assert gguf_file(tmp_path / "config.json") is None


def test_importing_is_light() -> None:
    code = (
        "import sys, engine.tokenizer, engine.detokenizer;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
