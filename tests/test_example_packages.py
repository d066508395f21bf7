"""The packages of examples/: installed with pip, run from their own YAML, and held to the conformance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.testing.tokenizer import EOS, byte_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = ("flex-attention", "suffix-speculator")
LINES = 150
"""Most lines of code of one package, tests aside."""

QUICK = "not test_flex or tree or smallest or chunked or softcap and mixed or windows and mixed"
"""Of the attention suite, what shows each mask once; `engine plugins check flex` runs all of it."""

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the packages. Their sources are copied first, since building writes there."""
    base = tmp_path_factory.mktemp("examples")
    for name in PACKAGES:
        for path in [p for p in (EXAMPLES / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts]:
            copy = base / name / path.relative_to(EXAMPLES / name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(base / "site"), *(str(base / name) for name in PACKAGES)], check=True)
    return base / "site"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process that sees the packages; more threads would not help tensors that small."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=site, env=environment
    )


def test_they_are_small() -> None:
    for name in PACKAGES:
        sources = [path for path in (EXAMPLES / name).glob("*/*.py") if path.parent.name != "tests"]
        lines = [line for path in sources for line in path.read_text().splitlines() if line.strip()]
        assert 50 < len(lines) < LINES, name


def test_they_pass_the_kit(site: Path) -> None:
    suites = [str(site.parent / name / "tests") for name in PACKAGES]
    result = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", QUICK, *suites)
    assert result.returncode == 0, result.stdout[-3000:]


def test_each_is_listed_and_its_configuration_valid(site: Path) -> None:
    engine = ("-c", "from engine.server.cli.main import main; main()")
    listed = json.loads(run(site, *engine, "plugins", "list", "--json").stdout)
    ours = {entry["name"]: entry for entry in listed if entry["distribution"] != "engine-llm"}
    assert {name: entry["state"] for name, entry in ours.items() if name in ("flex_attention", "automaton")} == {
        "flex_attention": "ok",
        "automaton": "ok",
    }
    for name in PACKAGES:
        result = run(site, *engine, "config", "check", str(EXAMPLES / name / "engine.yaml"))
        assert result.returncode == 0, result.stderr


SCRIPT = """
import json, sys
from engine import LLM, SamplingParams
results = []
base = [f"model.source=path:{sys.argv[1]}", "model.loader=dummy", "model.dtype=float32", "kv_cache.pages=128"]
always = [*base, "speculator.controller=false"]
for config, overrides in ((None, base), *((config, base) for config in sys.argv[2:]), (sys.argv[-1], always)):
    with LLM(config, overrides) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        texts = [llm.generate([prompt], params)[0].token_ids for prompt in ("once upon a time", "abcabcabc")]
        parts = {part: choice.name for part, choice in llm.composition.parts()}
        results.append({"texts": texts, "parts": parts, "drafts": llm.engine.stats()["drafts"]})
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a tiny random model says with the built-in parts, and with each package from its own YAML."""
    model = tmp_path_factory.mktemp("tiny")
    (model / "config.json").write_text(json.dumps(TINY))
    byte_tokenizer()._backend.save(str(model / "tokenizer.json"))
    result = run(site, "-c", SCRIPT, str(model), *(str(EXAMPLES / name / "engine.yaml") for name in PACKAGES))
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_text_is_the_same_with_each(results: list[dict[str, Any]]) -> None:
    built_in, flex, *automata = results
    assert flex["parts"]["attention"] == "flex"
    assert [len(text) for text in built_in["texts"]] == [40, 40]
    assert flex["texts"] == built_in["texts"]
    for automaton in automata:
        assert automaton["parts"]["speculator"] == "automaton"
        assert automaton["texts"] == built_in["texts"]


def test_drafts_are_accepted(results: list[dict[str, Any]]) -> None:
    drafts = results[3]["drafts"]
    assert drafts["faults"] == 0
    assert drafts["accepted"] > 10
    assert drafts["controller"] == {}


def test_the_controller_works_for_a_stranger(results: list[dict[str, Any]]) -> None:
    """Whether it pays here is a matter of time, so of the machine."""
    drafts = results[2]["drafts"]
    assert drafts["faults"] == 0
    assert drafts["controller"]["state"] in ("off", "probing", "on")
    assert 0 <= drafts["accepted"] <= drafts["drafted"]
