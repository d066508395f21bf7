"""`engine plan` on the configs of released models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.errors import EngineError
from engine.server.cli.main import program

PLANS = Path(__file__).parents[3] / "examples/plan"
R1 = str(PLANS / "deepseek-r1/config.json")


def engine(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["plan", *arguments])


def test_a_config_json_is_enough() -> None:
    result = engine(R1, "--device", "h200", "--context", "131072", "--compare", "mha,mla,mla-fp8")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.output.splitlines() if line}
    assert "305.000 GiB" in rows["mha"]
    assert "610.000 GiB" in rows["mha"]
    assert "4.289 GiB" in rows["mla"]
    assert "4.885 GiB" in rows["mla-fp8"]
    assert rows["mla"].endswith("1.00×")
    assert rows["mla-fp8"].endswith("1.14×"), "656 bytes a row instead of 576"
    assert "671,026,419,200" in rows["all"]
    assert "would not start" in result.output


def test_a_yaml_file_and_this_machine(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"model: {{source: 'path:{PLANS / 'qwen2.5-7b'}', loader: dummy}}\nkv_cache: {{pages: 8}}\n")
    result = engine(str(config), "--set", "device.kind=cpu", "--context", "64")
    assert result.exit_code == 0, result.output
    assert "the pool: 8 pages, 2 such requests" in result.output


def test_json_has_the_same_numbers() -> None:
    plan = json.loads(engine(R1, "--device", "h200", "--json").stdout)
    assert plan["profile"]["parameters"] == 671_026_419_200
    assert plan["pool"]["bytes_per_token"] == 70_272
    assert [fit["ranks"] for fit in plan["stored_ranks"]] == [1, 2, 4, 8, 16]
    assert plan["blocked"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compare", "mqa"), "'mqa' is no form of attention; known are mha"),
        (("--context", "999999"), "a context of 999999 tokens was asked for, but this model holds 1 to 163840"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], words: str) -> None:
    result = engine(R1, "--device", "h200", *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_an_unknown_device_is_named() -> None:
    result = engine(R1, "--device", "h2000")
    assert isinstance(result.exception, EngineError)
    assert "did you mean 'h200'" in str(result.exception)


def test_another_file_is_not_taken_for_the_config_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(R1).read_text())
    (tmp_path / "other.json").write_text("{}")
    result = engine(str(tmp_path / "other.json"), "--device", "h200")
    assert result.exit_code == 2
    assert "is read as a model's config.json; give it that name" in result.output


def test_an_empty_device_is_not_this_machine() -> None:
    assert "no device profile is named ''" in str(engine(R1, "--device", "").exception)


def test_an_error_of_a_config_json_names_the_file_and_no_option_that_nobody_typed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["NobodyKnowsThisForCausalLM"]}')
    error = str(engine(str(config)).exception)
    assert error.startswith(f"{config}: model.implementation"), error
    assert "--set" not in error
    typed = str(engine(str(config), "--set", f"model.source=path:{tmp_path}").exception)
    assert typed.startswith("--set model.source: ")
