"""`${NAME}` in secrets stands for an environment variable. Nowhere else does the environment change a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from engine.config.origins import Key, Origins, dotted
from engine.config.shape import is_secret, type_at
from engine.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand_all(model: type[BaseModel], data: Any, origins: Origins, at: Key, environ: Mapping[str, str]) -> Any:
    """A copy of `data`, which `model` will validate, with every `${NAME}` replaced where a secret stands.

    Parts that `model` leaves open (the options of a component) stay as they are: their own model comes later.

    Raises:
        ConfigError: `${NAME}` stands where no secret belongs, or the variable is not set.
    """
    return _Expansion(model, origins, at, environ).walk(data, ())


class _Expansion:
    def __init__(self, model: type[BaseModel], origins: Origins, at: Key, environ: Mapping[str, str]) -> None:
        self._model = model
        self._origins = origins
        self._at = at
        self._environ = environ

    def walk(self, data: Any, key: Key) -> Any:
        if isinstance(data, dict):
            return {name: self.walk(value, (*key, name)) for name, value in data.items()}
        if isinstance(data, list):
            return [self.walk(value, (*key, index)) for index, value in enumerate(data)]
        if isinstance(data, str) and (found := _VARIABLE.search(data)) and type_at(self._model, key) is not None:
            return self._expand(data, key, found[0])
        return data

    def _expand(self, text: str, key: Key, found: str) -> str:
        place = self._at + key
        start = f"{self._origins.near(place)}{dotted(place)}"
        if not is_secret(self._model, key):
            raise ConfigError(f"{start} holds {found}, but only secrets may come from the environment; write the value")
        for name in _VARIABLE.findall(text):
            if name not in self._environ:
                raise ConfigError(f"{start} holds ${{{name}}}, but the environment variable {name} is not set")
        return _VARIABLE.sub(lambda match: self._environ[match[1]], text)


__all__ = ["expand_all"]
