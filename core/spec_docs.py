"""The contract of each extension point as a page of Markdown, read off its spec module.

`engine plugins docs` prints the pages, and `docs/extension-points/` holds them. What the text of a spec says is read by
`engine.spec_source`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from engine.config.components import PLACES
from engine.plugin import Offer
from engine.spec_source import Field, SpecSource, paragraphs
from engine.specs import POINTS

LABELS: Final = ("Threads:", "Errors:")
"""Paragraphs that the docstring of every spec module has."""

_ELSEWHERE: Final[Mapping[str, str]] = {
    "model_sources": "the scheme of `model.source`",
    "server_routes": "`server.routes`",
    "cli_commands": "nowhere: a command is there once installed",
}
_INTRODUCTION: Final = """# Extension points

One page for each; `engine plugins docs POINT` prints it too. A hook returns offers while an engine is composed. What an
offer builds is called directly afterwards: no hook runs on the step.

How to make a plugin is in [writing a plugin](../writing-a-plugin.md), how one is found and what is refused in
[plugins](../plugins.md). Suites that hold a component to its contract are in `engine.testing`.
"""


def short_name(point: ModuleType) -> str:
    """What commands and pages call an extension point: the name of its spec module, such as `kv_cache`."""
    return point.__name__.rpartition(".")[2]


def title(point: ModuleType) -> str:
    """`Attention backends`, from the first line of the spec's docstring."""
    first = paragraphs(inspect.getdoc(point))[0].removeprefix("Extension point: ").partition(",")[0].rstrip(".")
    return first[0].upper() + first[1:]


def pages() -> dict[str, str]:
    """File name -> text of every page, the index `README.md` included."""
    rows = [
        f"| [{title(point)}]({short_name(point)}.md) | `{point.HOOK}` | {point.API} | {_place(point)} |"
        for point in POINTS
    ]
    index = [_INTRODUCTION, "| extension point | hook | version | in the YAML |", "|---|---|---|---|", *rows]
    return {"README.md": "\n".join(index) + "\n"} | {f"{short_name(point)}.md": page(point) for point in POINTS}


def page(point: ModuleType) -> str:
    """The page of one extension point."""
    source = SpecSource(inspect.getsource(point))
    hook = source.function(point.HOOK)
    offer: type[Offer[Any]] = getattr(point, "OFFER", Offer)
    facts = {
        "hook": f"`{point.HOOK}`",
        "version of the contract": f"{point.API} (`Offer.api`)",
        "module": f"`{point.__name__}`",
        "an offer is": f"`{offer.__module__}.{offer.__name__}`",
        "in the YAML": _place(point),
        "a package to start from": f"`engine plugins new {short_name(point)} NAME`",
    }
    parts = [
        f"# {title(point)}",
        "\n".join(["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in facts.items())]),
        *map(_labelled, paragraphs(inspect.getdoc(point))[1:]),
        "## The hook",
        _code(source.signature(hook)),
        ast.get_docstring(hook) or "",
        *_names(source, point),
    ]
    return "\n\n".join(parts) + "\n"


def _place(point: ModuleType) -> str:
    """Where the YAML names a component of this point."""
    keys = [f"`{'.'.join(map(str, key))}`" for key, hook in PLACES.items() if hook == point.HOOK]
    return ", ".join(keys) or _ELSEWHERE.get(point.HOOK, "nowhere")


def _names(source: SpecSource, point: ModuleType) -> Iterator[str]:
    """A section for each public class, constant and type, in the order of the module."""
    for name, node in source.named():
        if name not in point.__all__ or name in ("API", "HOOK", "OFFER", point.HOOK):
            continue
        yield f"## `{name}`"
        if isinstance(node, ast.ClassDef):
            yield from _class(source, node)
        else:
            yield _code(source.statement(node))
            yield source.text_after(node)


def _class(source: SpecSource, node: ast.ClassDef) -> Iterator[str]:
    kind = source.kind(node)
    yield from _text(f"{kind} {ast.get_docstring(node) or ''}")
    if fields := source.fields(node):
        yield _table(fields)
    for method in source.methods(node):
        yield f"### `{node.name}.{method.name}`"
        yield _code(source.signature(method))
        if not source.is_abstract(method) and kind == source.ABSTRACT:
            yield "Need not be overridden."
        yield from _text(ast.get_docstring(method) or "")


def _table(fields: list[Field]) -> str:
    rows = (
        f"| `{f.name}` | {_cell(f.type)} | {_cell(f.default)} | {f.meaning.replace('|', chr(92) + '|')} |"
        for f in fields
    )
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def _cell(code: str) -> str:
    return f"`{_escaped(code)}`" if code else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _labelled(paragraph: str) -> str:
    """`Threads: …` with its label in bold, and the form of `build` as a section."""
    label = next((label for label in LABELS if paragraph.startswith(label)), "")
    if paragraph.startswith("`build("):
        return "## What `build` receives\n\n" + paragraph
    return f"**{label}**{paragraph.removeprefix(label)}" if label else paragraph


def _text(docstring: str) -> Iterator[str]:
    """Paragraphs of a docstring; `Args:`, `Returns:` and `Raises:` become lists."""
    for paragraph in paragraphs(docstring):
        head, *lines = paragraph.splitlines()
        if head not in ("Args:", "Returns:", "Raises:"):
            yield paragraph
            continue
        items: list[str] = []
        for line in lines:
            inner = line.removeprefix("    ")
            if inner.startswith(" "):
                items[-1] += " " + inner.strip()
            else:
                items.append(inner)
        yield "\n".join([f"**{head[:-1]}**", "", *(f"- {item}" for item in items)])


__all__ = ["LABELS", "page", "pages", "short_name", "title"]
