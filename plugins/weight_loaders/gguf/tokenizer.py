"""The tokenizer that a GGUF file's metadata describe, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.plugins.weight_loaders.gguf.format import Header
from engine.plugins.weight_loaders.gguf.metadata import stop_token_ids
from engine.plugins.weight_loaders.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from engine.tokenizer import Tokenizer

_CONTROL: Final = 3  # token types of the format
_USER_DEFINED: Final = 4


def tokenizer_from(header: Header) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        ValueError: the file has none, or one of a kind that is not known.
    """
    meta = header.metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ValueError(f"{header.path} holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if kind == "gpt2":
        backend = _byte_level(header, tokens)
    elif kind == "llama":
        backend = _sentence_piece(header, tokens)
    else:
        raise ValueError(f"{header.path} has a tokenizer of kind {kind!r}; gpt2 and llama can be read")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend.add_special_tokens([_added(text) for text, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL])
    backend.add_tokens([_added(text) for text, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: meta.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    if add_bos and (bos := ids["bos_token"]) is not None:
        text = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(single=[text, "$A"], special_tokens=[(text, bos)])
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens={role: tokens[token] for role, token in ids.items() if token is not None},
        eos_token_ids=stop_token_ids(header),
        chat_templates=_templates(meta, template),
    )


def _templates(meta: dict[str, Any], default: str | None) -> dict[str, str]:
    names = meta.get("tokenizer.chat_templates") or []
    templates = {name: meta[f"tokenizer.chat_template.{name}"] for name in names}
    return templates | ({"default": default} if default else {})


def _added(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _byte_level(header: Header, tokens: list[str]) -> Backend:
    """BPE over bytes, as GPT-2 began it; models differ in how text is cut before merging."""
    meta = header.metadata
    name = meta.get("tokenizer.ggml.pre", "default")
    if (rule := PRE_TOKENIZERS.get(name)) is None:
        raise ValueError(f"{header.path} cuts text by the rule {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or []]
    vocab = {text: index for index, text in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _cuts(rule)
    backend.decoder = decoders.ByteLevel()
    return backend


def _cuts(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _sentence_piece(header: Header, tokens: list[str]) -> Backend:
    """SentencePiece BPE: a piece's score says when it is merged; unknown characters fall back to bytes."""
    meta = header.metadata
    scores = meta.get("tokenizer.ggml.scores")
    if not scores:
        raise ValueError(f"{header.path} lacks tokenizer.ggml.scores, which a tokenizer of kind 'llama' needs")
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    vocab = {text: index for index, text in enumerate(tokens)}
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    return backend


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best-scored piece first, and for each piece the longest left part."""
    found = [
        (-scores[index], -cut, piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]


__all__ = ["tokenizer_from"]
