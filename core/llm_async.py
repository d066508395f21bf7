"""The engine for asyncio programs, in a process of its own:

async with AsyncLLM("engine.yaml") as llm:
    async for piece in llm.stream("Once upon a time"): ...
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.bad_words import with_bad_words
from engine.client import EngineClient
from engine.completion import Completion, Dialect, Messages, Prompt, Writing
from engine.compose import resolve_source
from engine.config.load import load_config
from engine.config.model import EngineConfig
from engine.model_tokenizer import load_tokenizer
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.text import Delta
from engine.tokenizer import Tokenizer


class AsyncLLM:
    """An engine process for one event loop; its requests run side by side. Use it as an async context manager.

    Args:
        config: a YAML file, or a configuration; the embedded default model if unset.
        overrides: `KEY=VALUE` strings, applied to the file.
        registry: the installed plugins if unset; the engine process discovers its own.

    Raises:
        EngineError: the configuration is wrong.
    """

    def __init__(
        self,
        config: EngineConfig | Path | str | None = None,
        overrides: Sequence[str] = (),
        registry: Registry | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = load_config(Path(config) if config else None, overrides).config
        self._config = config
        self._registry = registry or Registry.discover(config.plugins.allow, config.plugins.deny)
        self._ids = itertools.count()
        self._client: EngineClient | None = None
        self._dialect: Dialect | None = None

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it takes requests.

        Raises:
            EngineError: something that the configuration names is missing, or the engine can't start.
        """
        config, registry = self._config, self._registry
        files = await asyncio.to_thread(resolve_source, config, registry, lambda share, words: None)
        self._client = await EngineClient.spawn(config, files.path)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, config, registry, files.path)
            template = config.model.chat_template
            parsers = choose_parsers(config, registry, tokenizer.model_text(template))
            self._dialect = Dialect(tokenizer, parsers, template)
            await self._client.wait_ready()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the engine; requests under way end with an error."""
        await self.client.close()

    @property
    def client(self) -> EngineClient:
        """The connection to the engine process."""
        assert self._client is not None, "AsyncLLM must be entered with `async with` first"
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        assert self._dialect is not None, "AsyncLLM must be entered with `async with` first"
        return self._dialect.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Completion:
        """Complete one prompt; gather several calls to run them at once.

        Args:
            template: variables for the chat template, if the prompt is a conversation; `tools` can be called.
            fields: further arguments of `engine.client.EngineClient.generate`, such as `priority` or `cache_salt`.

        Raises:
            RequestFailed: the prompt is refused (too long, say) or its computation failed.
            CoreFailed: the engine process is gone.
        """
        writing = self._begin(prompt, params, template)
        async with aclosing(self._deltas(writing, params, fields)) as deltas:
            async for _ in deltas:
                pass
        return writing.completion

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer a conversation; `template` goes to the chat template, `tools` among it. Raises as `generate`."""
        return await self.generate(messages, params, template=template)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Delta]:
        """The completion of one prompt, piece by piece; closing the iterator aborts the request.

        The pieces have the calls of tools as the model wrote them.

        Args:
            template, fields: as for `generate`, and it raises the same.
        """
        writing = self._begin(prompt, params, template)
        async with aclosing(self._deltas(writing, params, fields)) as deltas:
            async for delta in deltas:
                yield delta

    def _begin(self, prompt: Prompt, params: SamplingParams | None, template: Mapping[str, Any] | None) -> Writing:
        assert self._dialect is not None, "AsyncLLM must be entered with `async with` first"
        return self._dialect.begin(prompt, params or SamplingParams(), template or {})

    async def _deltas(
        self, writing: Writing, params: SamplingParams | None, fields: dict[str, Any]
    ) -> AsyncGenerator[Delta]:
        prompt = writing.completion.prompt_token_ids
        name = f"llm-{next(self._ids)}"
        chosen = with_bad_words(params or SamplingParams(), self.tokenizer)
        outputs = self.client.generate(prompt, chosen, request_id=name, **fields)
        async with aclosing(outputs):
            async for output in outputs:
                yield writing.take(output)
                if writing.finished:
                    return


__all__ = ["AsyncLLM"]
