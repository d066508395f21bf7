"""Packages that `engine plugins new` writes: one for each extension point, each as good as it says.

All are written once and tested in one run of pytest; the walk of docs/writing-a-plugin.md installs one with pip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from engine.errors import PluginError
from engine.hooks import API_GROUP, HOOK_API
from engine.scaffold import scaffold
from engine.server.cli.main import program
from engine.spec_docs import short_name
from engine.specs import POINTS
from engine.testing.tokenizer import EOS, byte_tokenizer

TEMPLATES = Path(__file__).parents[1] / "core" / "scaffold" / "templates"

QUICK = "not test_my_attention or smallest or chunked or windows and mixed or offer"
"""Tests of the attention suite that take their time are left to `engine plugins check` in the walk."""

STRICT = [
    "--isolated",
    "--line-length",
    "120",
    "--target-version",
    "py311",
    "--select",
    "E,F,I,UP,B,RUF,SIM,PIE,RET,PT",
]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": EOS + 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}
"""A model of a few thousand weights."""

every_point = pytest.mark.parametrize("point", POINTS, ids=short_name)


def name_of(point: ModuleType) -> str:
    return f"my-{short_name(point).replace('_', '-')}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package for every extension point."""
    folder = tmp_path_factory.mktemp("packages")
    for point in POINTS:
        scaffold(point, name_of(point)).write(folder / name_of(point))
    return folder


def visible(folder: Path) -> dict[str, str]:
    """An environment in which all packages can be imported; more threads would not help tensors that small."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(path) for path in sorted(folder.glob("my-*"))),
    }


@pytest.fixture(scope="module")
def outcomes(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name of each package's test module -> outcomes of its tests."""
    report = tmp_path_factory.mktemp("report") / "junit.xml"
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--junitxml={report}", "-k", QUICK]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(packages)],
        capture_output=True,
        check=False,
        cwd=packages,
        env=visible(packages),
    )
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = next(part for part in case.attrib["classname"].split(".") if part.startswith("test_"))
        found.setdefault(module, []).append(_outcome(case))
    return found


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if (element := case.find(kind)) is not None:
            return f"{kind} in {case.attrib['name']}: {element.attrib.get('message', '')[:300]}"
    return "passed"


def test_every_point_has_templates_and_every_template_a_point() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {short_name(point) for point in POINTS} | {"package"}


def test_every_template_is_shipped() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]["engine"]
    core = TEMPLATES.parents[1]
    assert [path for path in TEMPLATES.rglob("*") if path.is_file()] == [
        path for path in TEMPLATES.rglob("*") if any(path in core.glob(pattern) for pattern in shipped)
    ]


@every_point
def test_a_package_passes_its_own_tests_as_it_is_written(outcomes: dict[str, list[str]], point: ModuleType) -> None:
    found = outcomes[f"test_{name_of(point).replace('-', '_')}"]
    assert [outcome for outcome in found if outcome.startswith(("failure", "error"))] == []
    assert found.count("passed") >= 5


@every_point
def test_a_package_is_tidy(packages: Path, point: ModuleType) -> None:
    for arguments in (["check", "-q", *STRICT], ["format", "--check", "-q", *STRICT[:3]]):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=packages / name_of(point))
        assert result.returncode == 0, result.stdout


@every_point
def test_a_package_declares_its_entry_point_and_hook_api(packages: Path, point: ModuleType) -> None:
    name = name_of(point)
    project = tomllib.loads((packages / name / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {
        "engine": {name: name.replace("-", "_")},
        API_GROUP: {"hooks": f"v{HOOK_API}"},
    }
    assert (packages / name / name.replace("-", "_") / "__init__.py").is_file()
    text = (packages / name / "README.md").read_text()
    (implementation,) = [line.split("`")[1] for line in text.splitlines() if "what computes" in line]
    assert (packages / name / implementation).is_file()


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which all packages are installed, as far as their metadata say."""
    site = tmp_path_factory.mktemp("site")
    for name in [path.name for path in packages.glob("my-*")]:
        info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        groups = tomllib.loads((packages / name / "pyproject.toml").read_text())["project"]["entry-points"]
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in groups.items()]
        (info / "entry_points.txt").write_text("".join(lines))
    environment = visible(packages)
    return environment | {"PYTHONPATH": environment["PYTHONPATH"] + os.pathsep + str(site)}


def python(environment: dict[str, str], *arguments: str) -> str:
    """What a program prints."""
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_each_is_found_and_its_configuration_valid(packages: Path, installed: dict[str, str]) -> None:
    code = f"""
import pathlib
from engine.config.components import check
from engine.config.load import load_config
from engine.registry import Registry
registry = Registry.discover()
found = {{entry.distribution: entry for entry in registry.load() if entry.distribution.startswith("my-")}}
assert len(found) == {len(POINTS)}, found
assert {{entry.state for entry in found.values()}} == {{"ok"}}, found
for path in sorted(pathlib.Path({str(packages)!r}).glob("*/engine.yaml")):
    check(load_config(path), registry)
"""
    python(installed, "-c", code)


ENGINE = """
import json, sys
from engine import LLM, SamplingParams
chosen = ["attention=my-attention", "kv_cache=my-kv-cache", "speculator=my-speculator", "executor=my-executor",
          "scheduler=my-scheduling", "observers=[my-observer]", "grammar=my-grammar"]
for parts in ([], chosen, ["quantization=my-quantization"]):
    fixed = [f"model.source=path:{sys.argv[1]}", "model.loader=dummy", "model.dtype=float32", "kv_cache.pages=128"]
    with LLM(None, [*fixed, *parts]) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        texts = [each.token_ids for each in llm.generate(["abcabcabcabc", "once upon a time"], params)]
        names = sorted(choice.name for _, choice in llm.composition.parts() if choice.name.startswith("my-"))
    print(json.dumps([names, texts]))
"""


def test_an_engine_of_generated_parts_says_the_same(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    byte_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    built_in, ours, rounded = map(json.loads, python(installed, "-c", ENGINE, str(tmp_path)).splitlines())
    parts = ["attention", "executor", "grammar", "kv-cache", "observer", "scheduling", "speculator"]
    assert ours[0] == [f"my-{part}" for part in parts]
    assert ours[1] == built_in[1]
    assert [len(text) for text in ours[1]] == [24, 24]
    assert rounded[0] == ["my-quantization"]


def run(*arguments: str) -> str:
    """What the command says when it refuses."""
    result = CliRunner().invoke(program, ["plugins", "new", *arguments])
    assert isinstance(result.exception, PluginError), result.output
    return str(result.exception)


def test_the_command_writes_a_package_and_says_what_is_next(tmp_path: Path) -> None:
    result = CliRunner().invoke(program, ["plugins", "new", "kv-cache", "my-cache", "--dir", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(_shown(result.output, tmp_path))
    assert f"Next: pip install -e {tmp_path / 'my-cache'}, then engine plugins check my-cache" in result.output


def _shown(output: str, folder: Path) -> Iterator[str]:
    for line in output.splitlines():
        if line.startswith(str(folder)):
            yield str(Path(line).relative_to(folder))


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-cache").mkdir()
    said = run("kv_cache", "my-cache", "--dir", str(tmp_path))
    assert said == f"{tmp_path / 'my-cache'} exists already; take another name, or another place with --dir"
    assert list((tmp_path / "my-cache").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "My Cache",
            "'My Cache' is no name for a plugin: take lower-case letters, digits and hyphens, such as 'my-cache'",
        ),
        ("my_cache", "such as 'my-cache'"),
        ("9lives", "such as 'lives'"),
        ("--", "'--' is no name for a plugin"),
        ("auto", "'auto' is taken by Python or by engine itself; take another name, such as 'my-auto'"),
        (
            "torch",
            "a package 'torch' is installed, which this one would replace; take another name",
        ),
        ("pyyaml", "a package 'pyyaml' is installed"),
        ("json", "'json' is taken by Python"),
        ("class", "'class' is taken by Python"),
        ("engine", "'engine' is taken by Python or by engine itself"),
        ("radix", "the KV cache 'radix' is offered by engine-llm 0.1.0 already; take another name"),
    ],
)
def test_a_bad_name_is_refused_with_a_better_one(tmp_path: Path, name: str, said: str) -> None:
    assert said in run("kv_cache", "--dir", str(tmp_path), "--", name)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_point_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    said = run("attenton", "mine", "--dir", str(tmp_path))
    assert said.startswith("there is no extension point 'attenton'; there are attention, kv_cache, ")
    assert said.endswith("did you mean 'attention'?")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = run("kv_cache", "mine", "--dir", str(tmp_path / "file" / "below"))
    assert "can't be written: Not a directory" in said
