"""Incremental text equals the whole, for every kind of decoder and every split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)} | {"Ġt": 256, "Ã©": 257, "ðŁ": 258}
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("Ã", "©"), ("ð", "Ł")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_added(backend)


def pieces(strip: int) -> Tokenizer:
    words = ["▁", "▁a", "a", "b", "▁▁", "é", "東", "ab"]
    vocab = {text: i for i, text in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁"), ("a", "b")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", strip, 0)] if strip else [])])
    return _with_added(backend)


def words() -> Tokenizer:
    vocab = {text: i for i, text in enumerate(["[UNK]", "hello", "world", "##s", "##ing", "é", ",", "a"])}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _with_added(backend)


def _with_added(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<｜é x｜>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("héé b", special=False)])
    return Tokenizer(backend)


KINDS = {"byte level": byte_level(), "pieces": pieces(0), "stripped pieces": pieces(1), "twice stripped": pieces(2)}
TOKENIZERS = pytest.mark.parametrize("tokenizer", [*KINDS.values(), words()], ids=[*KINDS, "words"])


def stream(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    parts, at = [], 0
    while at < len(ids):
        step = sizes[len(parts) % len(sizes)]
        parts.append(detokenizer.push(ids[at : at + step]))
        at += step
    return [*parts, detokenizer.flush()]


@TOKENIZERS
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), skip=st.booleans())
def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    """Any tokens whatever, so most bytes are no text at all; some ids lie beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(stream(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="▁�")), sizes=st.lists(st.integers(1, 3), min_size=1)
)
def test_no_character_shows_before_it_is_whole(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    parts = stream(tokenizer, ids, sizes, skip=False)
    assert not any("�" in part for part in parts)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=False)


def test_text_comes_as_early_as_it_can() -> None:
    detokenizer = Detokenizer(KINDS["byte level"])
    ids = KINDS["byte level"].encode("a🎉b")
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "🎉", "b"]
    assert detokenizer.flush() == ""


def test_unfinished_characters_show_at_the_end() -> None:
    for kind in ("byte level", "pieces"):
        tokenizer = KINDS[kind]
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push(tokenizer.encode("🎉")[:-1]) == ""
        assert "�" in detokenizer.flush()


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("a<s>b<think>")
    assert "".join(stream(tokenizer, ids, [1], skip=True)) == "ab<think>"
    assert "".join(stream(tokenizer, ids, [1], skip=False)) == "a<s>b<think>"


@TOKENIZERS
def test_special_tokens_that_a_parser_reads_are_kept_while_others_are_skipped(tokenizer: Tokenizer) -> None:
    kept = tokenizer.special_among(["<｜é x｜>", "<think>", "a", "nowhere"])
    assert len(kept) == 1  # <think> is no special token, so it isn't skipped anyway
    ids = tokenizer.encode("<s>a<｜é x｜>a<s>")
    detokenizer = Detokenizer(tokenizer, True, kept)
    text = "".join([*(detokenizer.push([token]) for token in ids), detokenizer.flush()])
    assert "<｜é x｜>" in text
    assert "<s>" not in text
    assert text == tokenizer.decode(
        [t for t in ids if t not in tokenizer.special_ids - kept], skip_special_tokens=False
    )


def test_a_tokenizer_shows_what_its_model_writes() -> None:
    tokenizer = byte_level()
    assert tokenizer.model_text().added_tokens == {"<s>", "<｜é x｜>", "<think>", "héé b"}
    assert tokenizer.model_text().chat_template == ""
    assert tokenizer.model_text("{{ x }}").chat_template == "{{ x }}"
