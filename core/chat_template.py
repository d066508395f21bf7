"""Chat templates: Jinja text from a checkpoint (or a client), rendered in a sandbox with Hugging Face's conventions.

Templates are foreign code: they run in Jinja's immutable sandbox and see plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARK: Final = "CONTINUE_FINAL_MESSAGE_HERE "
"""Put behind the text to continue, and cut off again with all that the template adds after it. Ends in a space, so that
a template that strips its messages shows itself."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would show up in the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(text)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation.

    `continue_final_message` leaves the last message open, so that the model goes on with it.

    Raises:
        ValueError: the template is malformed or refuses the messages; the sentence carries the template's own words.
    """
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        chat = _marked(chat)
    arguments = dict(variables or {}) | {"messages": chat, "tools": list(tools) if tools else None}
    text = _guarded(lambda: _compile(template).render(**arguments, add_generation_prompt=add_generation_prompt))
    return _cut(text) if continue_final_message else text


def _guarded(work: Callable[[], str]) -> str:
    """Whatever goes wrong in foreign code on a client's messages is the client's mistake to read about."""
    try:
        return work()
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is malformed in line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"the chat template can't render these messages: {error}") from None


def _marked(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the mark behind the last text of its last message."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        return [*chat[:-1], chat[-1] | {"content": content + _MARK}]
    if isinstance(content, Sequence):
        for index in reversed(range(len(content))):
            if "text" in content[index]:
                block = dict(content[index]) | {"text": content[index]["text"] + _MARK}
                return [*chat[:-1], chat[-1] | {"content": [*content[:index], block, *content[index + 1 :]]}]
    raise ValueError("continue_final_message needs a last message with text to continue")


def _cut(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise ValueError("the chat template drops the final message, so it can't be continued")
    kept = text[:at]
    return kept if text.startswith(_MARK, at) else kept.rstrip()


__all__ = ["render"]
