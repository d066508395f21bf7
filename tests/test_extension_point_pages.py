"""docs/extension-points/ and the spec modules say the same, in both directions."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from engine.registry import Registry
from engine.server.cli.main import program
from engine.spec_docs import LABELS, page, pages, short_name
from engine.spec_source import SpecSource, paragraphs
from engine.specs import POINTS

DOCS = Path(__file__).parents[1] / "docs" / "extension-points"

every_point = pytest.mark.parametrize("point", POINTS, ids=short_name)


def test_every_page_is_what_the_generator_writes() -> None:
    found = {path.name: path.read_text() for path in DOCS.iterdir()}
    assert found == pages(), "write them anew: engine plugins docs --write docs/extension-points"


def test_every_hook_has_a_page_and_every_page_a_hook() -> None:
    modules = {path.stem for path in (Path(__file__).parents[1] / "core" / "specs").glob("*.py")} - {"__init__"}
    assert modules == {short_name(point) for point in POINTS}, "a spec module is missing from engine.specs.POINTS"
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} == modules


@every_point
def test_a_spec_says_who_calls_when_and_what_may_be_raised(point: ModuleType) -> None:
    said = paragraphs(inspect.getdoc(point))
    for label in (*LABELS, "`build("):
        assert [p for p in said if p.startswith(label)], f"the docstring of {point.__name__} has no paragraph {label!r}"


@every_point
def test_a_page_has_the_signature_of_every_public_method_and_each_is_explained(point: ModuleType) -> None:
    source, text = SpecSource(inspect.getsource(point)), page(point)
    assert source.signature(source.function(point.HOOK)) in text
    for name, node in source.named():
        if isinstance(node, ast.ClassDef) and name in point.__all__:
            assert ast.get_docstring(node), f"{name} has no docstring"
            for method in source.methods(node):
                assert source.signature(method) in text
                assert ast.get_docstring(method), f"{name}.{method.name} has no docstring"


@every_point
def test_build_takes_the_arguments_that_the_page_states(point: ModuleType) -> None:
    (form,) = [p for p in paragraphs(inspect.getdoc(point)) if p.startswith("`build(")]
    definition = "def " + " ".join(form.split("`")[1].split()) + ": ..."
    (function,) = ast.parse(definition).body
    assert isinstance(function, ast.FunctionDef)
    stated = {argument.arg for argument in function.args.kwonlyargs}
    built_in = [owned for owned in Registry.discover().offers(point.HOOK) if owned.entry.distribution == "engine-llm"]
    for owned in built_in:
        parameters = inspect.signature(owned.offer.build).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            taken = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
            assert taken - ({"inner"} if owned.offer.wraps else set()) == stated, owned.offer.name


def test_fields_carry_the_comments_that_stand_beside_them() -> None:
    source = SpecSource(
        "class Batch:\n"
        '    """A step."""\n\n'
        "    lengths: Tensor  # int32 [R]\n"
        "    masks: dict[int, Tensor] | None = None\n"
        '    """Which token sees\n    which."""\n'
        "    hidden: int = 3  # noqa: X1\n"
    )
    ((_, node),) = source.named()
    assert isinstance(node, ast.ClassDef)
    assert [(f.name, f.type, f.default, f.meaning) for f in source.fields(node)] == [
        ("lengths", "Tensor", "", "int32 [R]"),
        ("masks", "dict[int, Tensor] | None", "None", "Which token sees which."),
        ("hidden", "int", "3", ""),
    ]


def test_signatures_are_as_written_without_self() -> None:
    source = SpecSource("def f(self, a: int, *rest: str, b: int = 2, c: str, **more: int) -> None: ...\n")
    assert (
        source.signature(source.function("f")) == "def f(a: int, *rest: str, b: int = 2, c: str, **more: int) -> None"
    )


def test_the_command_prints_a_page_by_either_name() -> None:
    for name in ("kv-cache", "kv_caches"):
        result = CliRunner().invoke(program, ["plugins", "docs", name])
        assert result.output == pages()["kv_cache.md"]


def test_the_command_writes_all_pages(tmp_path: Path) -> None:
    result = CliRunner().invoke(program, ["plugins", "docs", "--write", str(tmp_path / "new")])
    assert result.exit_code == 0
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == pages()


def test_the_command_knows_no_other_points() -> None:
    result = CliRunner().invoke(program, ["plugins", "docs", "kv_cach"])
    assert "there is no extension point 'kv_cach'; there are attention, " in str(result.exception)
    assert str(result.exception).endswith("did you mean 'kv_cache'?")
