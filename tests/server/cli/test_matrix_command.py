"""`engine plugins matrix`, and the page that is made by it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from engine.errors import ConfigError
from engine.matrix import Cell, Table
from engine.registry import Registry
from engine.server.cli.main import program
from engine.server.cli.matrix import computed, markdown

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_the_page_is_what_the_built_ins_declare() -> None:
    built_in = Registry([e for e in Registry.discover().entries if e.distribution == "engine-llm"])
    assert PAGE.read_text() == markdown(computed(built_in)), "run `engine plugins matrix --markdown` for the page again"


def test_nobody_asks_this_machine_about_another() -> None:
    code = """
import importlib.util, sys
from engine.registry import Registry
importlib.util.find_spec = lambda name, package=None: None
sys.platform = "none"
from engine.server.cli.matrix import computed, markdown
built_in = Registry([e for e in Registry.discover().entries if e.distribution == "engine-llm"])
print(markdown(computed(built_in)), end="")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == PAGE.read_text()


def test_a_cell_that_does_not_fit_has_the_numbers_of_its_reasons() -> None:
    cells = (Cell("a", "x", ()), Cell("a", "y", ("too old", "too small")), Cell("b", "x", ("too small",)))
    page = markdown([Table("KV cache", "executor", (*cells, Cell("b", "y", ())))])
    assert page.partition("\n## ")[2] == (
        "KV cache and executor\n\n"
        "| KV cache / executor | x | y |\n|---|---|---|\n| a | yes | no: 1, 2 |\n| b | no: 2 | yes |\n\n"
        "1. too old\n2. too small\n"
    )


def test_for_one_device_every_cell_is_about_it() -> None:
    result = CliRunner().invoke(program, ["plugins", "matrix", "--device", "h200", "--json"])
    devices, *others = json.loads(result.stdout)
    assert {cell["column"] for cell in devices["cells"]} == {"h200"}
    pairs = {(t["rows"], t["columns"]): t["cells"] for t in others}
    (cell,) = [c for c in pairs["model", "quantization"] if (c["row"], c["column"]) == ("llama", "packed")]
    assert cell["fits"] is False
    assert "the quantization 'packed' can't run there: device cuda is not among cpu" in cell["reasons"]


def test_the_text_says_which_and_why() -> None:
    text = CliRunner().invoke(program, ["plugins", "matrix"]).stdout
    assert "KV cache / scheduling policy  fcfs" in text
    assert "lacks linears, which the quantization 'packed' requires" in text


def test_an_unknown_device_is_an_error() -> None:
    result = CliRunner().invoke(program, ["plugins", "matrix", "--device", "h20"])
    assert isinstance(result.exception, ConfigError)
