"""The pages of docs/ that repeat what the code says are in step with it."""

from __future__ import annotations

import re
from pathlib import Path

from engine.config.load import load_config
from engine.config.reference import markdown
from engine.registry import Registry

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_of_keys_is_what_the_models_say() -> None:
    built_in = Registry([e for e in Registry.discover().entries if e.distribution == "engine-llm"])
    page = (DOCS / "configuration.md").read_text()
    _, _, tables = page.partition("## All keys\n\n")
    expected = markdown(built_in)
    assert tables.strip() == expected.strip(), "replace what follows `## All keys` by `engine config reference`"


def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    path = tmp_path / "engine.yaml"
    path.write_text(example)
    loaded = load_config(path, environ={"ENGINE_KEY": "k"})
    assert loaded.config.speculator.options == {"max_match": 3}
    assert loaded.config.server.api_keys[0].get_secret_value() == "k"
