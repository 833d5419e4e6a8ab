"""Reads the configuration. A mistake raises ConfigError with the place, the key, the value and what is expected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gpumond.config import Settings
from gpumond.config.explain import explain
from gpumond.config.schema import ONLY_IN_FILE, PARTS, RECEIVER_TYPES, SettingsConfig
from gpumond.errors import ConfigError
from gpumond.host.files import read_text


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Return the settings. A flag of None and an empty variable count as absent. Raises ConfigError."""
    return read(file, flags, environ).settings()


def read(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> SettingsConfig:
    """Return the settings as they are written, like `load`."""
    values, where = {}, "configuration"
    if file is not None:
        values, where = read_yaml(file), str(file)
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
        raise ConfigError("\n".join(problems)) from None
    except (RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None


def read_yaml(file: Path) -> dict[str, Any]:
    import yaml  # most daemons have no file

    try:
        content = yaml.safe_load(read_text(file))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists or keys are nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected keys and values, as in `listen: 127.0.0.1:9917`")
    return content


def _model(location: Sequence[object]) -> type[BaseModel]:
    """Return the model that defines the key at ``location``."""
    if location[0] == "receivers" and len(location) > 3:
        return RECEIVER_TYPES[str(location[2])]
    if location[0] not in PARTS or len(location) < 3:
        return SettingsConfig
    default, parts = PARTS[str(location[0])]
    return parts.get(str(location[-2]), default)
