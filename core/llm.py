"""The engine inside a Python program, without a server: `LLM("engine.yaml").generate(["Once upon a time"])`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.assemble import assemble
from engine.compose import resolve_source
from engine.config.load import load_config
from engine.config.model import EngineConfig
from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.messages import Add, FinishReason, Output
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.text import ChoiceText
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


class RequestFailed(EngineError):
    """A request could not be computed."""


@dataclass(slots=True)
class Completion:
    """What came of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    kv_transfer: dict[str, Any] | None = None


class LLM:
    """An engine in this process. Not safe for use by several threads at once.

    Args:
        config: a YAML file, or a configuration; the embedded default model if unset.
        overrides: `KEY=VALUE` strings, applied to the file.
        registry: the installed plugins if unset.

    Raises:
        EngineError: the configuration is wrong, or something it needs is missing.
    """

    def __init__(
        self,
        config: EngineConfig | Path | str | None = None,
        overrides: Sequence[str] = (),
        registry: Registry | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = load_config(Path(config) if config else None, overrides).config
        plugins = registry or Registry.discover(config.plugins.allow, config.plugins.deny)
        files = resolve_source(config, plugins, lambda share, words: None)
        built = assemble(config, files.path, registry=plugins)
        self.engine, self.composition = built.engine, built.composition
        self.tokenizer: Tokenizer = built.composition.choices["loader"].build().tokenizer(files.path)
        self._ids = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Complete prompts, all in one batch.

        Args:
            params: for every prompt.
            fields: further fields of `engine.messages.Add`, such as `cache_salt` or `kv_transfer`.

        Raises:
            RequestFailed: a prompt is refused (too long, say) or its computation failed.
        """
        chosen = params or SamplingParams()
        running = {}
        for prompt in _several(prompts):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
            running[f"llm-{next(self._ids)}"] = _Work(Completion(ids), self.tokenizer, chosen)
        for request_id, work in running.items():
            refusal = self.engine.add(Add(request_id, work.completion.prompt_token_ids, chosen, **fields))
            if refusal is not None:
                self.engine.abort(list(running))
                raise RequestFailed(refusal.error)
        for output in self._outputs(running):
            work = running[output.request_id]
            if output.error:
                self.engine.abort(list(running))
                raise RequestFailed(output.error)
            if work.take(output):
                self.engine.abort([output.request_id])
        return [work.completion for work in running.values()]

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """Answer a conversation; `template` goes to the chat template."""
        text = self.tokenizer.apply_chat_template(list(messages), **template)
        return self.generate([self.tokenizer.encode(text)], params)[0]

    def _outputs(self, running: dict[str, _Work]) -> Iterator[Output]:
        while any(work.completion.finish_reason is None for work in running.values()):
            yield from (output for output in self.engine.step() if output.request_id in running)

    def close(self) -> None:
        """Release memory, threads and transports."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt is a text or a list of token ids."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class _Work:
    """A completion in the making."""

    def __init__(self, completion: Completion, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.completion = completion
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._text = ChoiceText(0, params, detokenizer, frozenset(tokenizer.eos_token_ids))

    def take(self, output: Output) -> bool:
        """Add news; True when a stop string ended the text although the engine would go on."""
        done = self.completion
        if done.finish_reason is not None:
            return False
        delta = self._text.feed(output)
        done.text += delta.text
        done.token_ids += delta.token_ids
        done.cached_tokens, done.kv_transfer = delta.cached_tokens, delta.kv_transfer
        if delta.finish_reason is not None:
            done.finish_reason = FinishReason(delta.finish_reason)
        return done.finish_reason is not None and output.finish_reason is None


__all__ = ["LLM", "Completion", "RequestFailed"]
