"""Text to token ids and back, around a `tokenizers.Tokenizer`. Imports neither torch nor transformers.

One tokenizer serves all requests of a process; its methods may be called from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from engine.chat_template import render
from engine.checkpoint import folder_config, read_json
from engine.specs.tool_parser import ModelText
from engine.token_bytes import Alphabet, alphabet_of

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes, decodes and renders chats.

    Args:
        backend: the tokenizer proper.
        special_tokens: texts by role, such as `{"bos_token": "<s>"}`; chat templates see them under these names.
        eos_token_ids: tokens that end a text; the id of `eos_token` if empty.
        chat_templates: Jinja texts by name; `default` is the usual one, `tool_use` is taken when tools are given.
        add_bos: whether `encode(…, add_special_tokens=True)` begins with the bos token; None leaves it to the backend.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self._add_bos = add_bos
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self._added = {token.content: index for index, token in added.items()}
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id: int | None = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or (() if eos is None else (eos,))
        self.alphabet: Alphabet | None = alphabet_of(backend)
        """How tokens spell bytes; None for a kind of tokenizer whose tokens have no bytes of their own."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and what stands beside it in a folder of the Hugging Face layout.

        Raises:
            ValueError: a file is missing or malformed; the sentence names it.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json; AutoTokenizer.save_pretrained of transformers writes one"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        settings = _optional(folder / "tokenizer_config.json")
        stops = folder_config(folder).get("eos_token_id") if (folder / "config.json").is_file() else None
        return cls(
            backend,
            special_tokens=_special_tokens(_optional(folder / "special_tokens_map.json") | settings),
            eos_token_ids=stops if isinstance(stops, list) else () if stops is None else (stops,),
            chat_templates=_chat_templates(folder, settings),
            add_bos=settings.get("add_bos_token"),
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. With `add_special_tokens` as the model expects a raw prompt to begin (and end)."""
        # A batch of one, since only batches let other threads run meanwhile: a long prompt takes seconds.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens or self._add_bos is None or self.bos_token_id is None:
            return ids
        begins = ids[:1] == [self.bos_token_id]
        if self._add_bos and not begins:
            return [self.bos_token_id, *ids]
        return ids[1:] if begins and not self._add_bos and not self._spelled(text) else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids beyond the vocabulary count as nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """What one token reads as by itself; bytes of a broken character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty beyond the vocabulary."""
        if self.alphabet is not None:
            return self.alphabet.token_bytes(token)
        return self.decode([token], skip_special_tokens=False).encode()

    def special_among(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens that read as one of these texts."""
        return frozenset(self._added[text] for text in texts if text in self._added) & self.special_ids

    def model_text(self, template: str | None = None) -> ModelText:
        """What parsers are chosen by; `template` replaces the checkpoint's chat templates."""
        templates = self._chat_templates.values() if template is None else [template]
        return ModelText(chat_template="\n".join(templates), added_tokens=frozenset(self._added))

    @cached_property
    def longest_token(self) -> int:
        """The most characters of text that one token can stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a template of its own."""
        return bool(self._chat_templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, special tokens spelled out: encode it without adding any.

        Args:
            messages: role and content, as the OpenAI API has them.
            tools: JSON schemas of functions.
            add_generation_prompt: end where the assistant's turn begins.
            continue_final_message: end within the last message.
            template: Jinja text to use instead of the checkpoint's, or the name of one of its templates.
            kwargs: further variables that the template may read.

        Raises:
            ValueError: there is no template, it is malformed, or it refuses these messages.
        """
        return render(
            self._template(template, bool(tools)),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._special_tokens | kwargs,
        )

    def _template(self, asked: str | None, tools: bool) -> str:
        known = self._chat_templates
        if asked is not None:
            return known.get(asked, asked)
        if tools and "tool_use" in known:
            return known["tool_use"]
        if "default" in known:
            return known["default"]
        if known:
            raise ValueError(f"the model has no default chat template; it has {', '.join(sorted(known))}")
        raise ValueError("the model has no chat template; set model.chat_template or use completions")

    def _spelled(self, text: str) -> bool:
        """Whether the prompt itself begins with the bos token, which is then not the backend's addition."""
        return text.startswith(self._special_tokens["bos_token"])

    def _id_of(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Roles that are filled; a token stands as text or as an object with its content."""
    found = {role: settings[role] for role in _NAMED if settings.get(role) is not None}
    return {role: token["content"] if isinstance(token, dict) else str(token) for role, token in found.items()}


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the settings and from files of their own, which win."""
    given = settings.get("chat_template")
    if isinstance(given, list):
        templates = {entry["name"]: entry["template"] for entry in given}
    else:
        templates = {"default": given} if given else {}
    files = [*folder.glob("chat_template.jinja"), *folder.glob("additional_chat_templates/*.jinja")]
    for path in files:
        name = "default" if path.name == "chat_template.jinja" else path.stem
        templates[name] = path.read_text(encoding="utf-8")
    if not templates and (folder / "chat_template.json").is_file():
        templates = {"default": json.loads((folder / "chat_template.json").read_text("utf-8"))["chat_template"]}
    return templates


__all__ = ["Tokenizer"]
