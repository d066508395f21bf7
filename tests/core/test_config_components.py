"""The second pass: component names are looked up and their options validated by the models they ship."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr

from engine.config.components import PLACES, check, named, validated_options
from engine.config.explain import explain
from engine.config.load import load_config
from engine.config.model import EngineConfig
from engine.config.origins import Origins, dotted
from engine.config.reference import markdown, option_rows
from engine.config.schema import json_schema
from engine.config.shape import fields, type_at
from engine.errors import ConfigError, PluginError
from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.registry import Registry
from engine.specs import POINTS


class Tier(BaseModel):
    """A part of the options below."""

    gigabytes: float = 1.0


class Tiered(Options):
    """Options with every kind of field."""

    levels: int = Field(default=2, gt=0, description="How many tiers.")
    token: SecretStr | None = Field(default=None, description="Opens the store.")
    tier: Tier = Tier()


def make(hook: str, *offers: Offer[Any]) -> object:
    return SimpleNamespace(**{hook: hookimpl(lambda: list(offers))})


@pytest.fixture
def registry() -> Registry:
    """What the default configuration names, and a cache with options."""
    tiered = Offer(name="tiered", summary="two tiers", build=lambda options: None, options=Tiered)
    radix = Offer(name="radix", summary="a tree", build=lambda options: None)
    fcfs = Offer(name="fcfs", summary="in order", build=lambda options: None)
    return Registry.of({"caches": make("kv_caches", tiered, radix), "policies": make("scheduling_policies", fcfs)})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return path


def complaint(registry: Registry, tmp_path: Path, text: str, *overrides: str) -> str:
    loaded = load_config(write(tmp_path, text), overrides)
    with pytest.raises(ConfigError) as caught:
        check(loaded, registry)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_every_place_is_a_section_with_use_and_options_and_names_a_point() -> None:
    points = {point.HOOK for point in POINTS}
    for key, point in PLACES.items():
        place = (*key, 0) if key[0] in ("kv_connectors", "observers") else key
        assert type_at(EngineConfig, (*place, "use")) is str
        assert type_at(EngineConfig, (*place, "options")) == dict[str, Any]
        assert point in points


def test_components_are_listed_with_their_keys() -> None:
    loaded = load_config(None, ["kv_connectors=[a, b]", "attention=reference"])
    found = {c.key: c for c in named(loaded.config)}
    assert found["kv_connectors", 1].use == "b"
    assert not found["attention",].by_default
    assert found["kv_cache",].by_default
    assert found["speculator",].absent
    assert not found["executor",].chosen


def test_a_good_configuration_passes(registry: Registry, tmp_path: Path) -> None:
    text = "kv_cache: {use: tiered, options: {levels: 3, tier: {gigabytes: 2.5}}}\n"
    check(load_config(write(tmp_path, text)), registry)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_cache: tierd\n", "engine.yaml:1: kv_cache: no KV cache named 'tierd'; installed: radix, tiered; did you"),
        (
            "kv_cache:\n  use: tiered\n  options:\n    level: 3\n",
            "engine.yaml:4: kv_cache.options.level is no known key; did you mean 'levels'? (known here: levels, token",
        ),
        (
            "kv_cache:\n  use: tiered\n  options: {levels: 0}\n",
            "engine.yaml:3: kv_cache.options.levels is 0, expected a number greater than 0",
        ),
        (
            "kv_cache: {use: tiered, options: {tier: {gigabytes: lots}}}\n",
            'engine.yaml:1: kv_cache.options.tier.gigabytes is "lots", expected a valid number',
        ),
        (
            "attention: {options: {x: 1}}\n",
            "engine.yaml:1: attention.options is given while attention.use is auto; name the component",
        ),
        ("speculator: {options: {x: 1}}\n", "engine.yaml:1: speculator.options is given while speculator.use is none"),
        ("executor: nowhere\n", "engine.yaml:1: executor: no executor named 'nowhere'; installed: none at all"),
        ("server: {routes: [admin]}\n", "engine.yaml:1: server.routes.0: no server route named 'admin'"),
    ],
)
def test_mistakes_name_file_line_and_key(registry: Registry, tmp_path: Path, text: str, said: str) -> None:
    assert complaint(registry, tmp_path, text).startswith(said)


def test_all_mistakes_are_told_at_once(registry: Registry, tmp_path: Path) -> None:
    said = complaint(registry, tmp_path, "kv_cache: x\nexecutor: y\n", "scheduler=z")
    assert [line.split(": no ")[0] for line in said.splitlines()] == [
        "engine.yaml:1: kv_cache",
        "--set scheduler: scheduler",
        "engine.yaml:2: executor",
    ]


def test_secrets_in_options_are_expanded_and_never_shown(registry: Registry) -> None:
    offer = registry.get("kv_caches", "tiered").offer
    options = validated_options(offer, {"token": "${T}"}, Origins(), ("kv_cache",), {"T": "hunter2"})
    assert isinstance(options, Tiered)
    assert options.token is not None
    assert options.token.get_secret_value() == "hunter2"
    with pytest.raises(ConfigError, match=r"kv_cache.options.token holds \$\{T\}, but the environment variable T is"):
        validated_options(offer, {"token": "${T}"}, Origins(), ("kv_cache",), {})
    with pytest.raises(ConfigError) as caught:
        validated_options(offer, {"token": ["hunter2"]}, Origins(), ("kv_cache",), {})
    assert "hunter2" not in str(caught.value)


# explain


def test_explain_lists_every_value_with_its_origin(registry: Registry, tmp_path: Path) -> None:
    path = write(tmp_path, "kv_cache:\n  use: tiered\n  options:\n    levels: 3\n    token: hunter2\n")
    loaded = load_config(path, ["server.api_keys.0=hunter2", "server.port=9000"])
    rows = {row.key: row for row in explain(loaded, registry)}
    assert rows["kv_cache.options.levels"][1:] == ("3", f"{path}:4")
    assert rows["kv_cache.options.tier.gigabytes"][1:] == ("1.0", "default")
    assert rows["kv_cache.use"][1:] == ('"tiered"', f"{path}:2")
    assert rows["server.port"][1:] == ("9000", "--set server.port")
    assert rows["model.max_context"][1:] == ("unset", "default")
    assert rows["server.api_keys.0.key"].value == rows["kv_cache.options.token"].value == "********"
    assert "hunter2" not in str(rows)


def test_explain_leaves_no_key_of_the_tree_out(registry: Registry) -> None:
    shown = {row.key.removesuffix(".0") for row in explain(load_config(None), registry)}
    listed = (key for key, _ in fields(EngineConfig) if "*" not in key and key[-1] != "options")
    assert {dotted(key) for key in listed} <= shown


# schema and reference


def references(schema: Any) -> set[str]:
    """Every `$ref` in a schema."""
    if isinstance(schema, dict):
        own = {schema["$ref"]} if "$ref" in schema else set()
        return own.union(*(references(value) for value in schema.values()))
    return set().union(*(references(item) for item in schema)) if isinstance(schema, list) else set()


def test_the_schema_has_the_options_of_each_component(registry: Registry) -> None:
    schema = json_schema(registry)
    assert schema["$schema"].endswith("2020-12/schema")
    short, section = schema["properties"]["kv_cache"]["anyOf"]
    assert short["enum"] == ["auto", "radix", "tiered"]
    case = next(c for c in section["allOf"] if c.get("if", {}).get("properties", {}).get("use") == {"const": "tiered"})
    assert case["then"]["properties"]["options"]["$ref"] == "#/$defs/kv_caches.tiered"
    assert schema["$defs"]["kv_caches.tiered"]["properties"]["levels"]["exclusiveMinimum"] == 0
    assert schema["$defs"]["kv_caches.tiered"]["additionalProperties"] is False


def test_every_reference_of_the_schema_resolves(registry: Registry) -> None:
    for schema in (json_schema(registry), json_schema(Registry.discover())):
        found = references(schema)
        assert "#/$defs/SchedulerSection" in found
        assert {r.removeprefix("#/$defs/") for r in found} <= set(schema["$defs"])


def test_the_schema_knows_lists_nested_places_and_absence(registry: Registry) -> None:
    schema = json_schema(registry)
    assert schema["properties"]["speculator"]["anyOf"][0]["enum"][:2] == ["none", "auto"]
    assert "anyOf" in schema["properties"]["kv_connectors"]["items"]
    assert "anyOf" in schema["$defs"]["ModelSection"]["properties"]["loader"]


def test_the_reference_says_type_default_and_meaning(registry: Registry) -> None:
    lines = markdown(registry).splitlines()
    assert "| `server.api_keys.*.key` | secret text | required | What the client sends as a bearer token. |" in (
        next(line for line in lines if "server.api_keys.*.key" in line)
    )
    assert "| `kv_connectors.*.use` | text | required | Name of an installed KV connector. |" in lines
    assert "### KV cache `tiered`" in lines
    assert "| `levels` | whole number | `2` | How many tiers. |" in lines


def test_option_rows_of_nested_options() -> None:
    assert [row[:3] for row in option_rows(Tiered)] == [
        ("levels", "whole number", "`2`"),
        ("token", "secret text", "unset"),
        ("tier.gigabytes", "number", "`1.0`"),
    ]


def test_every_key_of_the_tree_has_a_description() -> None:
    assert [key for key, field in fields(EngineConfig) if not field.description] == []


def test_a_clash_of_plugins_is_told_once_not_for_every_part() -> None:
    one = SimpleNamespace(kv_caches=hookimpl(lambda: [Offer(name="x", summary="", build=lambda options: None)]))
    two = SimpleNamespace(kv_caches=hookimpl(lambda: [Offer(name="x", summary="", build=lambda options: None)]))
    with pytest.raises(PluginError, match=r"\Athe KV cache 'x' is offered twice by given 0[^\n]*\Z"):
        check(load_config(None, ("kv_cache=x", "attention=y")), Registry.of({"one": one, "two": two}))
