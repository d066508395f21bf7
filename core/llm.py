"""The engine inside a Python program, without a server: `LLM("engine.yaml").generate(["Once upon a time"])`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.assemble import assemble
from engine.bad_words import with_bad_words
from engine.completion import Completion, Dialect, Messages, Prompt, RequestFailed, Writing, several
from engine.compose import resolve_source
from engine.config.load import load_config
from engine.config.model import EngineConfig
from engine.messages import Add
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.text import Delta
from engine.tokenizer import Tokenizer


class LLM:
    """An engine in this process. Not safe for use by several threads at once; see `AsyncLLM` for that.

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
        template = config.model.chat_template
        parsers = choose_parsers(config, plugins, self.tokenizer.model_text(template))
        self._dialect = Dialect(self.tokenizer, parsers, template)
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}  # that the engine works on

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """Complete prompts, as many at once as the engine takes; the first failure ends all.

        Args:
            params: for every prompt.
            template: variables for the chat template, if prompts are conversations; `tools` can be called.
            fields: further fields of `engine.messages.Add`, such as `cache_salt` or `kv_transfer`.

        Raises:
            RequestFailed: a prompt is refused (too long, say) or its computation failed.
        """
        requests = [self._request(prompt, params, template, fields) for prompt in several(prompts)]
        queue, running = deque(requests), list[_Request]()
        try:
            while queue or running:
                while queue and self._add(queue[0]):
                    running.append(queue.popleft())
                self._step()
                for request in running:
                    request.news.clear()
                    request.raise_failure()
                running = [request for request in running if not request.writing.finished]
        finally:
            self._forget(running)
        return [request.writing.completion for request in requests]

    def chat(self, messages: Messages, params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer a conversation; `template` goes to the chat template, `tools` among it. Raises as `generate`."""
        return self.generate([messages], params, template=template)[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Iterator[Delta]:
        """The completion of one prompt, piece by piece. Several may be read in turn; closing one aborts its request.

        The pieces have the calls of tools as the model wrote them.

        Args:
            template, fields: as for `generate`.

        Raises:
            RequestFailed: as `generate`, when the first piece is asked for or later.
        """
        request = self._request(prompt, params, template, fields)
        try:
            while not self._add(request):
                self._step()
            while request.news or not request.writing.finished:
                if not request.news:
                    self._step()
                    request.raise_failure()
                while request.news:
                    yield request.news.popleft()
        finally:
            self._forget([request])

    def close(self) -> None:
        """Release memory, threads and transports."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        template: Mapping[str, Any] | None,
        fields: Mapping[str, Any],
    ) -> _Request:
        chosen = with_bad_words(params or SamplingParams(), self.tokenizer)
        writing = self._dialect.begin(prompt, chosen, template or {})
        return _Request(Add(f"llm-{next(self._ids)}", writing.completion.prompt_token_ids, chosen, **fields), writing)

    def _add(self, request: _Request) -> bool:
        """Hand a request to the engine; False when its queue is full for now."""
        refusal = self.engine.add(request.add)
        if refusal is None:
            self._requests[request.add.request_id] = request
            return True
        if refusal.refused and self.engine.has_work:
            return False
        raise RequestFailed(refusal.error)

    def _step(self) -> None:
        """One step of the engine, for whichever requests it works on."""
        for output in self.engine.step():
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            try:
                request.news.append(request.writing.take(output))
            except RequestFailed as error:
                request.failure = error
            if output.finish_reason is not None:
                del self._requests[output.request_id]
            elif request.writing.finished:
                self._forget([request])

    def _forget(self, requests: Sequence[_Request]) -> None:
        """Abort those that the engine still works on."""
        left = [r.add.request_id for r in requests if self._requests.pop(r.add.request_id, None) is not None]
        self.engine.abort(left)


class _Request:
    """One prompt on its way."""

    def __init__(self, add: Add, writing: Writing) -> None:
        self.add, self.writing = add, writing
        self.news: deque[Delta] = deque()
        self.failure: RequestFailed | None = None

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


__all__ = ["LLM", "Completion", "RequestFailed"]
