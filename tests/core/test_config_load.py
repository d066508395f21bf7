"""YAML and overrides -> configuration; every error names file, line, key, value and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from engine.config.load import LoadedConfig, load_config
from engine.config.model import EngineConfig
from engine.config.origins import Origins
from engine.config.problems import validated
from engine.config.source import parse
from engine.errors import ConfigError

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a text as the file `engine.yaml`."""

    def loads(text: str | bytes, *overrides: str, **environ: str) -> LoadedConfig:
        path = tmp_path / "engine.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_config(path, overrides, environ)

    return loads


@pytest.fixture
def complaint(load: Load, tmp_path: Path) -> Callable[..., str]:
    """What loading a text complains about, without the folder."""

    def said(text: str | bytes, *overrides: str, **environ: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, **environ)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}/", "")

    return said


Complaint = Callable[..., str]


def test_without_a_file_everything_is_a_default() -> None:
    loaded = load_config(None)
    assert loaded.config == EngineConfig()
    assert loaded.path is None
    assert loaded.origins.of(("kv_cache", "page_size")) is None


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n", "~"])
def test_an_empty_file_is_an_empty_tree(load: Load, text: str) -> None:
    assert load(text).config == EngineConfig()


def test_values_and_their_lines(load: Load, tmp_path: Path) -> None:
    loaded = load("kv_cache:\n  page_size: 32\n  memory: 1.5GiB\nmodel: {source: 'path:x'}\n")
    assert loaded.config.kv_cache.page_size == 32
    assert loaded.config.kv_cache.memory == 3 * 2**29
    assert loaded.origins.of(("kv_cache", "page_size")) == f"{tmp_path}/engine.yaml:2"
    assert loaded.origins.of(("model", "source")) == f"{tmp_path}/engine.yaml:4"
    assert loaded.origins.of(("kv_cache", "use")) is None


def test_a_name_is_short_for_a_section(load: Load) -> None:
    loaded = load("attention: reference\nkv_connectors: [local]\nobservers:\n  - request_log\n")
    assert loaded.config.attention.use == "reference"
    assert loaded.config.kv_connectors[0].use == "local"
    assert loaded.config.observers[0].use == "request_log"
    assert str(loaded.origins.of(("attention", "use"))).endswith(":1")
    assert str(loaded.origins.of(("observers", 0, "use"))).endswith(":4")


def test_anchors_give_a_value_twice(load: Load) -> None:
    loaded = load("kv_cache: {page_size: &n 8}\nspeculator: {max_draft: *n}\n")
    assert (loaded.config.kv_cache.page_size, loaded.config.speculator.max_draft) == (8, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "engine.yaml:1: not valid YAML: "),
        ("model:\n\tsource: x\n", "engine.yaml:2: not valid YAML: found character '\\t'"),
        ("model: *nobody\n", "engine.yaml:1: not valid YAML: found undefined alias 'nobody'"),
        ("a: 1\n---\nb: 2\n", "engine.yaml:2: not valid YAML: but found another document"),
        ("model: {source: \x01}\n", "engine.yaml:1: not valid YAML: special characters are not allowed"),
        ("model:\n  dtype: auto\n  dtype: float32\n", "engine.yaml:3: model.dtype is given twice, first in line 2"),
        ("model: !!python/object:os.system {}\n", "engine.yaml:1: the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("model: {name: !secret x}\n", "engine.yaml:1: not valid YAML: could not determine a constructor for the tag"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "engine.yaml:3: merge keys (<<) are not supported"),
        ("model:\n  1: x\n", "engine.yaml:2: a key must be text, not '1'"),
        ("? [a, b]\n: c\n", "engine.yaml:1: a key must be text"),
        ("model: &m\n  inner: *m\n", "engine.yaml:1: model.inner contains itself"),
        ("model: {name: 2024-99-99}\n", "engine.yaml:1: '2024-99-99' is not a value: month must be in 1..12"),
        ("- model\n", "engine.yaml:1: expected a mapping of sections such as `model:`, found list"),
        ("model\n", "engine.yaml:1: expected a mapping of sections such as `model:`, found str"),
        (b"model: {name: \xff}\n", "engine.yaml:1: not UTF-8 text"),
        ("[" * 5000, "engine.yaml:1: nested too deeply"),
    ],
)
def test_bad_yaml_is_one_sentence_with_the_line(complaint: Complaint, text: str | bytes, said: str) -> None:
    assert complaint(text).startswith(said)


def test_aliases_of_aliases_do_not_eat_the_memory(complaint: Complaint) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "more than 100000 values, aliases counted" in complaint("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_cache:\n  page_sze: 8\n", "engine.yaml:2: kv_cache.page_sze is no known key; did you mean 'page_size'?"),
        ("atention: x\n", "engine.yaml:1: atention is no known key; did you mean 'attention'?"),
        ("kv_cache: {page_size: 0}\n", "engine.yaml:1: kv_cache.page_size is 0, expected a number greater than 0"),
        ("kv_cache: {page_size: yes}\n", "engine.yaml:1: kv_cache.page_size is true, expected a valid integer"),
        ("kv_cache: {page_size: '8'}\n", 'engine.yaml:1: kv_cache.page_size is "8", expected a valid integer'),
        ("model: {dtype: bf16}\n", "engine.yaml:1: model.dtype is \"bf16\", expected 'auto', 'float32', 'bfloat16' or"),
        ("kv_cache: {memory: 2Gi}\n", 'engine.yaml:1: kv_cache.memory is "2Gi", expected a number of bytes such as'),
        ("server: {drain_seconds: .nan}\n", "engine.yaml:1: server.drain_seconds is NaN, expected a finite number"),
        (
            "server: {drain_seconds: .inf}\n",
            "engine.yaml:1: server.drain_seconds is Infinity, expected a finite number",
        ),
        ("model:\n", "engine.yaml:1: model is null, expected a valid dictionary"),
        ("kv_connectors:\n  - {role: both}\n", "engine.yaml:2: kv_connectors.0.use is missing"),
        ("kv_connectors: local\n", 'engine.yaml:1: kv_connectors is "local", expected a valid list'),
        ("server:\n  port: 65536\n", "engine.yaml:2: server.port is 65536, expected a number less than or equal to"),
    ],
)
def test_a_bad_value_names_line_key_value_and_expectation(complaint: Complaint, text: str, said: str) -> None:
    assert complaint(text).startswith(said)


def test_all_problems_are_told_at_once_and_long_values_are_cut(complaint: Complaint) -> None:
    lines = complaint(f"kv_cache: {{page_size: -1}}\nserver: {{port: '{'9' * 500}'}}\n").splitlines()
    assert [line.split(" is ")[0] for line in lines] == [
        "engine.yaml:1: kv_cache.page_size",
        "engine.yaml:2: server.port",
    ]
    assert max(map(len, lines)) < 200


def test_the_known_keys_of_a_section_under_a_name_are_told() -> None:
    class Item(BaseModel):
        model_config = ConfigDict(extra="forbid")
        size: int = 1

    class Items(BaseModel):
        items: dict[str, Item] = {}

    with pytest.raises(ConfigError, match=r"items\.a\.sise is no known key; did you mean 'size'\?"):
        validated(Items, {"items": {"a": {"sise": 2}}}, Origins(), (), {})


def test_a_file_that_is_not_there_or_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file .*missing.yaml"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_config(tmp_path)


# --set


def test_overrides_win_in_order_and_are_remembered(load: Load) -> None:
    loaded = load("kv_cache: {page_size: 8}\n", "kv_cache.page_size=32", "kv_cache.page_size=64", "model.name=m")
    assert (loaded.config.kv_cache.page_size, loaded.config.model.name) == (64, "m")
    assert loaded.origins.of(("kv_cache", "page_size")) == "--set kv_cache.page_size"


def test_an_override_keeps_the_rest_of_its_section(load: Load) -> None:
    loaded = load("kv_cache: {page_size: 8, pages: 5}\n", "kv_cache.pages=7")
    assert (loaded.config.kv_cache.page_size, loaded.config.kv_cache.pages) == (8, 7)


def test_an_override_replaces_a_whole_section(load: Load) -> None:
    loaded = load("kv_cache: {page_size: 8, pages: 5}\n", "kv_cache={pages: 7}")
    assert (loaded.config.kv_cache.page_size, loaded.config.kv_cache.pages) == (None, 7)
    assert loaded.origins.of(("kv_cache", "page_size")) is None
    assert loaded.origins.of(("kv_cache", "pages")) == "--set kv_cache"


def test_an_override_goes_inside_a_short_section(load: Load) -> None:
    loaded = load("speculator: ngram\n", "speculator.options.max_match=3")
    assert loaded.config.speculator.use == "ngram"
    assert loaded.config.speculator.options == {"max_match": 3}
    assert str(loaded.origins.of(("speculator", "use"))).endswith("engine.yaml:1")


def test_lists_are_reached_by_index_and_grow_at_the_end(load: Load) -> None:
    text = "kv_connectors: [{use: a}, {use: b}]\n"
    loaded = load(text, "kv_connectors.1.role=producer", "kv_connectors.2=c", "server.api_keys.0=k")
    assert [c.use for c in loaded.config.kv_connectors] == ["a", "b", "c"]
    assert loaded.config.kv_connectors[1].role == "producer"
    assert len(loaded.config.server.api_keys) == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("kv_cache.page_size", "--set kv_cache.page_size: expected KEY=VALUE"),
        ("=5", "--set : expected KEY=VALUE"),
        ("kv_cache..pages=5", "--set kv_cache..pages: expected KEY=VALUE"),
        ("kv_cache.page_size=[", "--set kv_cache.page_size: not valid YAML"),
        ("kv_cache.page_size=-1", "--set kv_cache.page_size: kv_cache.page_size is -1, expected a number greater than"),
        ("kv_cache.sise=1", "--set kv_cache.sise: kv_cache.sise is no known key"),
        ("kv_connectors.5=x", "--set kv_connectors.5: '5' must be a number from 0 to 1"),
        ("kv_connectors.first=x", "--set kv_connectors.first: 'first' must be a number from 0 to 1"),
        ("server.port.x=1", "--set server.port.x: server.port is 5, which has no parts"),
    ],
)
def test_a_bad_override_is_one_sentence(complaint: Complaint, override: str, said: str) -> None:
    assert complaint("kv_connectors: [local]\nserver: {port: 5}\n", override).startswith(said)


# ${NAME}


def test_secrets_come_from_the_environment(load: Load) -> None:
    loaded = load("server: {api_keys: ['${KEY}', 'sk-${A}${B}', plain]}\n", KEY="k", A="1", B="2")
    assert [key.key.get_secret_value() for key in loaded.config.server.api_keys] == ["k", "sk-12", "plain"]
    assert "sk-12" not in repr(loaded.config)


def test_a_missing_variable_is_an_error_that_names_it(complaint: Complaint) -> None:
    said = complaint("server:\n  api_keys:\n    - ${KEY}\n")
    assert said == "engine.yaml:3: server.api_keys.0 holds ${KEY}, but the environment variable KEY is not set"


def test_only_secrets_may_come_from_the_environment(complaint: Complaint) -> None:
    said = complaint("model:\n  source: path:${HOME}/m\n", HOME="/root")
    assert said.startswith("engine.yaml:2: model.source holds ${HOME}, but only secrets may come from the environment")


def test_an_unknown_key_with_a_variable_is_an_unknown_key(complaint: Complaint) -> None:
    assert "is no known key" in complaint("modell: ${HOME}\n", HOME="/root")


def test_a_secret_is_never_shown_in_an_error(complaint: Complaint) -> None:
    assert complaint("server: {api_keys: hunter2}\n").endswith("server.api_keys is hidden, expected a valid list")
    assert "hunter2" not in complaint("server: {api_keys: [[hunter2]]}\n")
    assert "hunter2" not in complaint("", "server.api_keys.0={hunter2: 1}")


# The reader as such

scalars = st.none() | st.booleans() | st.integers() | st.text(alphabet=st.characters(codec="utf-8"), max_size=10)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(trees)
def test_the_data_are_those_of_the_plain_loader(tree: object) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    data, origins = parse(text, str)
    assert data == yaml.safe_load(text)
    assert all(origin.text.isdecimal() for origin in origins.values())
