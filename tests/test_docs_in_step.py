"""The pages of docs/ that repeat what the code says are in step with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config.components import check
from engine.config.load import load_config
from engine.config.reference import markdown
from engine.registry import Registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KEYS = {"ENGINE_KEY": "k", "ENGINE_API_KEY": "k"}


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
    assert loaded.config.server.api_keys[0].key.get_secret_value() == "k"


def test_the_configuration_of_the_readme_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "engine.yaml"
    path.write_text(example)
    check(load_config(path, environ=KEYS), Registry.discover())


OTHERS = {"router.yaml", "kubernetes.yaml"}
"""No engine's; tests/server/router/test_disaggregation_page.py checks them."""

EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if not (path.parent / "pyproject.toml").exists() and path.name not in OTHERS
]
"""Those of packages need the package; tests/test_example_packages.py installs them."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    check(load_config(path, environ=KEYS), Registry.discover())


def test_links_between_pages_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^):#]+)[^):]*\)", page.read_text())]
    assert links
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_script_of_faults_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "fault-injection.md").read_text(), re.DOTALL)
    path = tmp_path / "engine.yaml"
    path.write_text(example)
    check(load_config(path), Registry.discover())


def test_the_configurations_of_the_operations_page_are_valid(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (DOCS / "operations.md").read_text(), re.DOTALL)
    assert len(examples) > 2
    for text in examples:
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        environ = {name: name for name in re.findall(r"\${(\w+)}", text)}
        check(load_config(path, environ=environ), Registry.discover())
