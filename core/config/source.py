"""YAML text -> plain data, with the line of every value.

Stricter than PyYAML's loader: a key given twice, a tag, a merge key or a value that contains itself is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from engine.config.origins import Key, Origin, dotted
from engine.errors import ConfigError

_MOST_VALUES = 100_000  # aliases of aliases can name more values than any memory holds


def read(path: Path) -> tuple[Any, dict[Key, Origin]]:
    """The data of a YAML file and where each part stands; an empty file is an empty mapping.

    Raises:
        ConfigError: the file can't be read, is not UTF-8, or is not the YAML we accept.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file in UTF-8") from None
    data, origins = parse(text, lambda line: f"{path}:{line}")
    return ({} if data is None else data), origins


def parse(text: str, where: Callable[[int], str]) -> tuple[Any, dict[Key, Origin]]:
    """The data of one YAML document and the origin of each part, `where(line)` being its text; lines count from 1.

    Raises:
        ConfigError: beginning with `where` of the offending line.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        walk = _Walk(where)
        return (None if node is None else walk.value(node, ())), walk.origins
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{where(mark.line + 1 if mark else 1)}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where(line)}: not valid YAML: {error.reason}") from None
    except RecursionError:
        raise ConfigError(f"{where(1)}: nested too deeply") from None


class _Walk:
    """Turns nodes into data, filling `origins` on the way."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.origins: dict[Key, Origin] = {}
        self._where = where
        self._scalars = yaml.constructor.SafeConstructor()
        self._open: set[int] = set()  # ids of the nodes on the path from the root

    def value(self, node: yaml.Node, key: Key) -> Any:
        if len(self.origins) > _MOST_VALUES:
            raise self._error(node, f"more than {_MOST_VALUES} values, aliases counted")
        self.origins[key] = Origin(self._where(node.start_mark.line + 1), leaf=not node.value)
        if isinstance(node, yaml.ScalarNode):
            self.origins[key] = Origin(self._where(node.start_mark.line + 1), leaf=True)
            return self._scalar(node)
        if id(node) in self._open:
            raise self._error(node, f"{dotted(key)} contains itself")
        self._open.add(id(node))
        try:
            return self._mapping(node, key) if isinstance(node, yaml.MappingNode) else self._sequence(node, key)
        finally:
            self._open.remove(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return self._scalars.construct_object(node)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise self._error(node, f"{node.value!r} is not a value: {error}") from None

    def _mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        self._untagged(node, "tag:yaml.org,2002:map")
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = self._name(name_node)
            line = name_node.start_mark.line + 1
            if name in data:
                raise self._error(name_node, f"{dotted((*key, name))} is given twice, first in line {lines[name]}")
            data[name] = self.value(value_node, (*key, name))
            lines[name] = line
            # A key is what people look for, even when its value begins further down.
            self.origins[*key, name] = Origin(self._where(line), self.origins[*key, name].leaf)
        return data

    def _sequence(self, node: yaml.Node, key: Key) -> list[Any]:
        self._untagged(node, "tag:yaml.org,2002:seq")
        return [self.value(item, (*key, index)) for index, item in enumerate(node.value)]

    def _name(self, node: yaml.Node) -> str:
        if node.tag == "tag:yaml.org,2002:merge":
            raise self._error(node, "merge keys (<<) are not supported; write the values out")
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            raise self._error(node, f"a key must be text, not {node.value!r}; put it into quotes")
        return name

    def _untagged(self, node: yaml.Node, plain: str) -> None:
        if node.tag != plain:
            raise self._error(node, f"the tag {node.tag!r} is not supported")

    def _error(self, node: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self._where(node.start_mark.line + 1)}: {problem}")


__all__ = ["parse", "read"]
