"""The parser that the documentation writes, through the shared suite; and the YAML beside it."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

from engine.config.components import check
from engine.config.load import load_config
from engine.registry import Registry
from engine.testing.tool_parser import Example, ToolParserConformance

PAGE = (Path(__file__).parents[3] / "docs" / "tools-and-reasoning.md").read_text()


def documented() -> types.ModuleType:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = types.ModuleType("documented_parser")
    exec(compile(source, "docs/tools-and-reasoning.md", "exec"), module.__dict__)
    return module


class TestDocumented(ToolParserConformance):
    (offer,) = documented().tool_parsers()
    module = "engine.specs.tool_parser"  # the page's own module can't be imported by name
    examples = (Example('Ok @f {"a": 1} done', "Ok done", [("f", '{"a": 1}')]), Example("me@x.org", "me@x.org"))


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    texts = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(texts) == 2
    for text in texts:
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        check(load_config(path, environ={}), Registry.discover())
    assert "documented_parser" not in sys.modules
