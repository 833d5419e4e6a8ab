"""Reads the configuration. A mistake raises ConfigError with the place, the key, the value and what is expected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gpumond.config import Settings
from gpumond.config.explain import explain, key_at
from gpumond.config.schema import ONLY_IN_FILE, PARTS, RECEIVER_TYPES, SettingsConfig
from gpumond.errors import ConfigError
from gpumond.host.files import read_text


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    content: str | None = None,
) -> Settings:
    """Return the settings. A flag of None and an empty variable count as absent. Raises ConfigError.

    ``content`` is that of the file if it has been read.
    """
    return read(file, flags, environ, content).settings()


def read(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    content: str | None = None,
) -> SettingsConfig:
    """Return the settings as they are written, like `load`."""
    values, where = {}, "configuration"
    if file is not None:
        values, where = read_yaml(file, content), str(file)
    origin = dict.fromkeys(values, where)
    for name in SettingsConfig.model_fields:
        variable = f"GPUMOND_{name.upper()}"
        if environ.get(variable) and name not in ONLY_IN_FILE:
            values[name], origin[name] = environ[variable], f"environment variable {variable}"
        if flags and flags.get(name) is not None:
            values[name], origin[name] = flags[name], f"--{name.replace('_', '-')}"
    try:
        return SettingsConfig.model_validate(values)
    except ValidationError as error:
        problems = (explain(entry, origin, where, _model, RECEIVER_TYPES) for entry in error.errors())
        places = (_place(entry["loc"], origin, where, file, content) for entry in error.errors())
        raise ConfigError("\n".join(problems), "; ".join(dict.fromkeys(places))) from None
    except (RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}", where) from None


MAX_DEPTH = 64
"""Lists and keys in brackets that may be nested. The time of the parser grows with the square of their depth."""


def read_yaml(file: Path, text: str | None = None) -> dict[str, Any]:
    """Return the content of a file; ``text`` if it has been read. Raises ConfigError."""
    import yaml  # most daemons have no file

    try:
        text = read_text(file) if text is None else text
        _check_depth(text)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists or keys are nested too deeply", str(file)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}, line {mark.line + 1}: not YAML" if mark else f"{file}: not YAML"
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}", place) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected keys and values, as in `listen: 127.0.0.1:9917`", str(file))
    return content


def _check_depth(text: str) -> None:
    """Raise RecursionError if more than ``MAX_DEPTH`` lists or keys in brackets are nested. Raises YAMLError."""
    import yaml

    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return  # nearly every file
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken)):
            depth += 1
        elif isinstance(token, (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)):
            depth -= 1
        if depth > MAX_DEPTH:
            raise RecursionError


def _place(
    location: Sequence[int | str], origin: Mapping[str, str], where: str, file: Path | None, text: str | None
) -> str:
    """Return the place of a key: its flag, variable or file, with the line if the text of the file is known."""
    place = origin.get(str(location[0]), where) if location else where
    if file is None or text is None or place != str(file):
        return place
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:  # deeper than when it was loaded
        node = None
    if node is None:
        return place
    for part in location:  # a part that the file does not have, such as the type of a receiver, is passed over
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), node)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
    return f"{place}, line {node.start_mark.line + 1}: {key_at(location)}"


def _model(location: Sequence[object]) -> type[BaseModel]:
    """Return the model that defines the key at ``location``."""
    if location[0] == "receivers" and len(location) > 3:
        return RECEIVER_TYPES[str(location[2])]
    if location[0] not in PARTS or len(location) < 3:
        return SettingsConfig
    default, parts = PARTS[str(location[0])]
    return parts.get(str(location[-2]), default)
