"""A tool parser written in YAML: markers, and what stands between them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.hooks import hookimpl
from engine.parsing.calls import Calls
from engine.parsing.formats import ProgramFormat
from engine.parsing.json_call import CallKeys, read_call
from engine.parsing.marked import Body, marked, named_body
from engine.parsing.python_call import read_python_call
from engine.parsing.reader import Reader, Reading
from engine.plugin import Options
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer


class DeclarativeOptions(Options):
    """How calls are spelled."""

    begin: str = Field(min_length=1, description="Text before a call.")
    end: str = Field(default="", description="Text after a call, if there is any.")
    body: Literal["json", "named", "kwargs"] = Field(
        default="json",
        description="A call is json, an object with a name and arguments; named, a name, `separator` and JSON "
        "arguments; or kwargs, as in f(a=1).",
    )
    name_key: str = Field(default="name", description="For json: the member that has the function's name.")
    arguments_key: str = Field(default="arguments", description="For json: the member that has the arguments.")
    separator: str | None = Field(default=None, min_length=1, description="For named: text after the name.")
    section_begin: str | None = Field(default=None, min_length=1, description="Text before all calls, if there is any.")
    section_end: str = Field(default="", description="Text after all calls.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.body == "named") != (self.separator is not None):
            raise ValueError("separator goes with body: named, and only with it")
        if self.section_end and self.section_begin is None:
            raise ValueError("section_end needs section_begin")
        return self


def _body(options: DeclarativeOptions) -> Body:
    if options.separator is not None:
        return named_body(options.separator)
    if options.body == "kwargs":
        return _kwargs
    keys = CallKeys(options.name_key, (options.arguments_key,))
    return lambda reader, calls: read_call(reader, calls, keys=keys)


def _kwargs(reader: Reader, calls: Calls) -> Reading[bool]:
    yield from reader.space()
    return (yield from read_python_call(reader, calls))


def build(options: DeclarativeOptions) -> ToolFormat:
    """The format that the options describe."""
    section = None if options.section_begin is None else (options.section_begin, options.section_end)
    texts = (options.begin, options.end, options.separator, options.section_begin, options.section_end)
    return ProgramFormat(
        lambda functions: marked(options.begin, options.end, _body(options), section),
        markers=tuple(text for text in texts if text),
    )


def recognizes(model: ModelText) -> str | None:
    """Never taken unasked: the markers are the user's to name."""
    return None


@hookimpl
def tool_parsers() -> list[ToolParserOffer]:
    """A format made of options."""
    return [
        ToolParserOffer(
            name="declarative",
            summary="Markers of your own around JSON, NAME and JSON, or f(a=1).",
            build=build,
            options=DeclarativeOptions,
            recognizes=recognizes,
        )
    ]
