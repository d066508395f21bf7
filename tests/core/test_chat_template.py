"""Chat templates render as transformers renders them, and every failure is a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.chat_template import render

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  <b>Hi</b> & 'you' 東  "},
    {"role": "assistant", "content": " Hello there  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ünï <x>", "parameters": {"b": 1, "a": 2}}}]


def each(body: str) -> str:
    """A template that writes something for every message."""
    return "{% for m in messages %}" + body + "{% endfor %}"


TEMPLATES = {
    "plain": each("<{{ m.role }}>{{ m['content'] }}\n"),
    "blocks": each("\n    {% if m.role != 'system' %}\n{{ m.content | trim }}\n    {% endif %}\n"),
    "generation": each("{% generation %}{{ m.content }}|{{ loop.index }}{% endgeneration %}"),
    "continue": each("{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"),
    "break": each("{{ messages[-1].content }}{% break %}"),
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}" + each("{{ m.content }}"),
    "prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% else %}<end>{% endif %}",
    "variables": "{{ bos_token }}{{ thinking }}{{ nothing }}{{ messages[-1]['content'] }}",
    "namespace": "{% set n = namespace(x=0) %}" + each("{% set n.x = n.x + 1 %}{{ m.content }}") + "{{ n.x }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[-1].content }}",
    "absent": "{% if tools is defined and tools %}yes{% else %}no{% endif %}{{ messages[-1].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(("prompt", "resume"), [(True, False), (False, False), (False, True)])
def test_renders_as_transformers(name: str, tools: Any, prompt: bool, resume: bool) -> None:
    variables = {"bos_token": "<s>", "thinking": True}
    theirs, _ = render_jinja_template(
        [CHAT],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        continue_final_message=resume,
        **variables,
    )
    ours = render(
        TEMPLATES[name],
        CHAT,
        tools=tools,
        add_generation_prompt=prompt,
        continue_final_message=resume,
        variables=variables,
    )
    assert ours == theirs[0]


def test_the_last_text_of_a_list_is_continued() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}, {"type": "image"}]
    template = "{% for b in messages[-1].content %}{{ b.text }}.{% endfor %}<end>"
    text = render(
        template,
        [{"role": "assistant", "content": blocks}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == "one..two"
    assert blocks[2]["text"] == "two", "the caller's messages are left alone"


def test_absent_fields_stay_absent() -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert render("{{ 'content' in messages[0] }} {{ messages[0].tool_calls is defined }}", chat) == "False False"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "malformed in line 1"),
        ("\n{{ messages | nosuch }}", "malformed in line 2: No filter named 'nosuch'"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ missing.field }}", "refuses these messages: 'missing' is undefined"),
        ("{{ 'a' + 1 }}", "can't render these messages: can only concatenate"),
        ("{{ messages[0].content | int / 0 }}", "can't render these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "can't render these messages: Range too big"),
        ("{{ messages[0] | tojson(indent='x') ~ [1][9].x }}", "refuses these messages"),
    ],
)
def test_failures_are_sentences(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render(template, CHAT)


@pytest.mark.parametrize(
    ("chat", "prompt", "words"),
    [
        ([], False, "needs a last message with text"),
        ([{"role": "assistant"}], False, "needs a last message with text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], False, "needs a last message with text"),
        (CHAT, True, "exclude each other"),
        ([*CHAT, {"role": "hidden", "content": "x"}], False, "drops the final message"),
    ],
)
def test_what_cannot_be_continued(chat: list[dict[str, Any]], prompt: bool, words: str) -> None:
    template = "{% for m in messages if m.role != 'hidden' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=words):
        render(template, chat, add_generation_prompt=prompt, continue_final_message=True)
