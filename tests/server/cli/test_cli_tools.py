"""`engine plugins …`, `engine config …` and `engine doctor`, on what is installed here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from engine.discovery import Entry, State
from engine.errors import EngineError
from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Mask, Needs, Offer, Options
from engine.registry import Registry
from engine.server.cli.main import program
from engine.server.cli.table import table


def engine(*arguments: str) -> Result:
    return CliRunner().invoke(program, list(arguments))


def error(*arguments: str) -> str:
    result = engine(*arguments)
    assert isinstance(result.exception, EngineError), result.output
    return str(result.exception)


class WideOptions(Options):
    """The options of the cache below."""

    ways: int = 4


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good plugin, a broken one, a refused one and nothing else."""

    def explode() -> object:
        raise ImportError("no libfoo.so")

    wide = Offer(
        name="wide",
        summary="a cache with many ways",
        build=lambda options: None,
        options=WideOptions,
        rank=7,
        available=lambda device: "it is Sunday",
        requires={"attention_backends": Needs(page_size=16, masks=frozenset({Mask.TREE}))},
        capabilities=Capabilities(
            page_sizes=frozenset({16, 64}),
            min_compute_capability=(9, 0),
            masks=frozenset({Mask.TREE}),
            flags=frozenset({Flag.PREFIX_REUSE}),
        ),
    )

    def entry(name: str, **more: object) -> Entry:
        return Entry(**({"name": name, "distribution": "acme", "version": "1.0", "api": 1, "load": explode} | more))  # type: ignore[arg-type]

    plugins = Registry(
        [
            entry("acme-wide", load=lambda: SimpleNamespace(kv_caches=hookimpl(lambda: [wide]))),
            entry("acme-broken"),
            entry("acme-old", api=None, state=State.REFUSED, reason="acme does not say which hook API"),
        ]
    )
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls, allow=None, deny=(): plugins))


@pytest.mark.usefixtures("installed")
def test_list_shows_owner_state_and_what_is_wrong() -> None:
    lines = [re.split(r"  +", line) for line in engine("plugins", "list").output.splitlines()]
    assert lines == [
        ["NAME", "DISTRIBUTION", "VERSION", "API", "STATE", "OFFERS, OR WHAT IS WRONG"],
        ["acme-wide", "acme", "1.0", "v1", "ok", "wide"],
        ["acme-broken", "acme", "1.0", "v1", "broken", lines[2][-1]],
        ["acme-old", "acme", "1.0", "?", "refused", "acme does not say which hook API"],
    ]
    assert lines[2][-1].startswith("ImportError: no libfoo.so (test_cli_tools.py:")


@pytest.mark.usefixtures("installed")
def test_list_as_json() -> None:
    wide, broken, _ = json.loads(engine("plugins", "list", "--json").output)
    assert wide["offers"] == [{"point": "kv_caches", "name": "wide"}]
    assert (wide["state"], broken["state"], broken["offers"]) == ("ok", "broken", [])


def test_list_tells_of_what_will_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "acme 1.0 (entry point acme) uses hook API v0, which ends with engine 0.9; write it for v1"
    old = Entry(name="acme", distribution="acme", version="1.0", api=0, load=lambda: None, warnings=(said,))
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls, allow=None, deny=(): Registry([old])))
    assert f"warning: {said}\n" in engine("plugins", "list").output
    assert json.loads(engine("plugins", "list", "--json").output)[0]["warnings"] == [said]


def test_list_obeys_a_configuration(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("plugins: {deny: [kv_caches.paged]}\n")
    lines = engine("plugins", "list", "--config", str(config)).output.splitlines()
    assert [line.split()[4] for line in lines if line.startswith("kv_caches.")] == ["denied", "ok"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["wide", "acme-wide"])
def test_show_describes_a_component(name: str) -> None:
    output = engine("plugins", "show", name).output
    for line in (
        "wide: KV cache",
        "  a cache with many ways",
        "  from acme 1.0, plugin acme-wide; rank 7",
        "  page sizes: 16, 64",
        "  min compute capability: 9.0",
        "  masks: tree",
        "  flags: prefix_reuse",
        "  requires of the attention backend: 16, tree",
    ):
        assert f"{line}\n" in output
    assert re.search(r"ways +whole number +`4`", output)


@pytest.mark.usefixtures("installed")
def test_show_says_why_a_plugin_is_broken_and_what_is_near_an_unknown_name() -> None:
    output = engine("plugins", "show", "acme-broken").output
    assert "acme-broken: plugin of acme 1.0, hook API v1, broken" in output
    assert "ImportError: no libfoo.so" in output
    assert error("plugins", "show", "wde").startswith(
        "nothing named 'wde' is installed (see `engine plugins list`); did"
    )


def test_explain_tells_part_by_part_what_is_composed() -> None:
    output = engine("plugins", "explain", "--set", "model.dtype=float32", "--set", "device.kind=cpu").output
    assert re.search(r"model +LlamaForCausalLM, 135 M weights", output)
    assert re.search(r"dtype +float32, at most \d+ tokens a request", output)
    assert re.search(r"kv_cache +radix +taken +- +the default", output)
    assert re.search(r"kv_cache +paged +fits +- +fits too, but radix is the default", output)
    assert re.search(r"loader +safetensors +refused +- +does not recognize", output)


def test_explain_as_json() -> None:
    found = json.loads(engine("plugins", "explain", "--json", "--set", "kv_cache=paged").stdout)
    assert found["parts"]["kv_cache"]["why"] == "named in the configuration"
    verdicts = {c["name"]: c["verdict"] for c in found["parts"]["kv_cache"]["candidates"]}
    assert (verdicts["paged"], verdicts["radix"]) == ("taken", "fits")


def test_explain_for_a_device_that_is_not_here() -> None:
    found = json.loads(engine("plugins", "explain", "--json", "--device", "h200").stdout)
    assert (found["device"]["name"], found["device"]["here"]) == ("NVIDIA H200", False)
    assert found["model"]["dtype"] == "bfloat16"
    cpu = next(c for c in found["parts"]["attention"]["candidates"] if c["name"] == "cpu")
    assert cpu["verdict"] == "refused"
    assert "device cuda is not among cpu" in cpu["reasons"]
    assert found["parts"]["attention"]["candidates"][0]["cost"]["decode_ms"] > 0
    text = engine("plugins", "explain", "--device", "h200").output
    assert "device  cuda: NVIDIA H200, as written down" in text
    assert "of one request of 4,096 tokens" in text


def test_explain_for_a_device_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: cpu\nname: Mine\nmemory: 8GiB\n")
    output = engine("plugins", "explain", "--device", str(path)).output
    assert "device  cpu: Mine, as written down" in output
    assert "cost    unknown" in output


def test_explain_of_what_does_not_fit_says_why() -> None:
    said = error("plugins", "explain", "--set", "model.max_context=10000000")
    assert said.startswith("--set model.max_context: model.max_context is 10000000, but the model was trained for")


def test_check_says_ok_or_what_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("kv_cache: radix\n")
    assert engine("config", "check", str(config)).output == f"{config}: ok\n"
    assert engine("config", "check", "--set", "kv_cache=paged").output == "the configuration: ok\n"
    assert error("config", "check", str(config), "--set", "kv_cache.use=radx").startswith(
        "--set kv_cache.use: kv_cache: no KV cache named 'radx'; installed: paged, radix; did you mean 'radix'?"
    )
    assert "there is no configuration file" in error("config", "check", str(tmp_path / "none.yaml"))


def test_config_explain_shows_values_and_origins() -> None:
    lines = engine("config", "explain", "--set", "kv_cache.pages=7").output.splitlines()
    assert [re.split(r"  +", line) for line in lines if line.startswith("kv_cache.p")] == [
        ["kv_cache.page_size", "unset", "default"],
        ["kv_cache.pages", "7", "--set kv_cache.pages"],
    ]
    rows = json.loads(engine("config", "explain", "--json").output)
    assert {"key": "logging.level", "value": '"info"', "origin": "default"} in rows


def test_schema_and_reference_know_what_is_installed() -> None:
    schema = json.loads(engine("config", "schema").output)
    assert "radix" in schema["properties"]["kv_cache"]["anyOf"][0]["enum"]
    assert "| `kv_cache.page_size` | whole number | unset |" in engine("config", "reference").output


@pytest.mark.usefixtures("installed")
def test_doctor_says_what_runs_here_and_why_not() -> None:
    output = engine("doctor", "--device", "cpu").output
    assert re.search(r"KV cache +wide +no +it is Sunday", output)
    assert re.search(r"plugin +acme-broken +no +broken: ImportError: no libfoo.so", output)
    assert re.search(r"torch +\d", output)
    assert re.search(r"native CPU kernels +(built|not built)", output)


def test_tables_are_aligned_and_never_cut() -> None:
    assert table(("A", "LONG"), [("x" * 200, "y"), ("z", "")]) == (
        "\x1b[1mA" + " " * 201 + "LONG\x1b[0m\n" + "x" * 200 + "  y\nz"
    )
