"""Reads the configuration. A mistake raises ConfigError with the place, the key, the value and what is expected."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gpumond.config.models import MISSING, expectation, parse_yaml, value_at, yaml_problem
from gpumond.config.settings import ONLY_IN_FILE, RECEIVER_TYPES, Settings, SettingsConfig
from gpumond.facts.errors import ConfigError, did_you_mean
from gpumond.host.files import read_text, replace_file, unreadable_text


def load_settings(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    content: str | None = None,
) -> Settings:
    """Return the settings. A flag of None and an empty variable count as absent. Raises ConfigError.

    ``content`` is that of the file if it has been read.
    """
    return read_settings_config(file, flags, environ, content).settings()


def read_settings_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    content: str | None = None,
) -> SettingsConfig:
    """Return the settings as they are written, like `load_settings`."""
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
        if file is not None and content is None:
            with suppress(OSError, ValueError):
                content = read_text(file)
        problems = (
            _with_line(error_text(entry, origin, where, values), entry["loc"], file, content)
            for entry in error.errors()
        )
        places = (_key_and_place(entry["loc"], origin, where, file, content) for entry in error.errors())
        raise ConfigError("\n".join(problems), "; ".join(dict.fromkeys(places))) from None
    except (RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}", where) from None


EXPECTED_FILE = "a YAML file such as deploy/gpumond.example.yaml; without one, gpumond uses the defaults"


def read_yaml(file: Path, text: str | None = None, expected: str = EXPECTED_FILE) -> dict[str, Any]:
    """Return the content of a file; ``text`` if it has been read. ``expected``: what it is for. Raises ConfigError."""
    import yaml  # most daemons have no file

    try:
        text = read_text(file) if text is None else text
        content = parse_yaml(text)
    except OSError as error:
        raise ConfigError(unreadable_text(file, error, expected), f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists or keys are nested too deeply", str(file)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        line, problem = yaml_problem(error)
        place = str(file) if line is None else f"{file}, line {line}"
        raise ConfigError(f"{place}: {problem}", f"invalid YAML ({place})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected keys and values, as in `listen: 127.0.0.1:9917`", str(file))
    return content


def _key_and_place(
    location: Sequence[int | str], origin: Mapping[str, str], where: str, file: Path | None, text: str | None
) -> str:
    """Return the place of a key: its flag, variable or file; the key and its line if the text of the file is known."""
    place = origin.get(str(location[0]), where) if location else where
    line = None if file is None or text is None or place != str(file) else _line_of_key(location, text)
    return place if line is None else f"{key_text(location)} ({place}, line {line})"


def _with_line(problem: str, location: Sequence[int | str], file: Path | None, text: str | None) -> str:
    """Return a problem with the line of its key in the file, if it begins with the file's name and has a key."""
    prefix = f"{file}: "
    line = _line_of_key(location, text) if location and text is not None and problem.startswith(prefix) else None
    return problem if line is None else f"{file}, line {line}: {problem.removeprefix(prefix)}"


def _line_of_key(location: Sequence[int | str], text: str) -> int | None:
    """Return the line of a key in a file with that text; None if the text can't be read again."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (RecursionError, yaml.YAMLError):  # deeper than when it was loaded, or the file has changed
        node = None
    if node is None:
        return None
    mark = node.start_mark
    for part in location:  # a part that the file does not have, such as the type of a receiver, is passed over
        if isinstance(node, yaml.MappingNode):
            key, node = next(((key, value) for key, value in node.value if key.value == part), (None, node))
            mark = key.start_mark if key else mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.start_mark
    return int(mark.line) + 1


def model_at(root: type[BaseModel], location: Sequence[object]) -> type[BaseModel]:
    """Return the model that defines the key at ``location`` in ``root``."""
    model = root
    for part in location[:-1]:
        if model in RECEIVER_TYPES.values():
            model = RECEIVER_TYPES[str(part)] if part in RECEIVER_TYPES else model
        elif field := model.model_fields.get(str(part)):
            model = _model_in(field.annotation) or model
    return model


def keys_in(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model of a type such as ``tuple[RuleConfig, ...]``."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def key_text(location: Sequence[object]) -> str:
    """Return the text of a location, such as ``rules[0].above``."""
    parts = location if location[:1] != ("receivers",) else (*location[:2], *location[3:])  # without the type
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def error_text(error: Any, origin: Mapping[str, str], where: str, values: object = None) -> str:
    """Return one line for an error of pydantic. ``origin``: the places of the settings, by name; ``where``: that of the
    others. ``values``: the settings as they are written.
    """
    location = error["loc"]
    place = origin.get(str(location[0]), where) if location else where
    key = key_text(location)
    if error["type"] == "extra_forbidden":
        known_keys = keys_in(model_at(SettingsConfig, location))
        if location[0] == "receivers" and any(location[-1] in each.model_fields for each in RECEIVER_TYPES.values()):
            return f"{place}: {key}: not a key of type {location[2]}; expected one of {', '.join(known_keys)}"
        hint = did_you_mean(str(location[-1]), known_keys) or f"; expected one of {', '.join(known_keys)}"
        return f"{place}: {key}: unknown key{hint}"
    if error["type"].startswith("union_tag"):
        tag_text = f" {tag!r:.80}:" if (tag := error["ctx"].get("tag")) else ""
        return f"{place}: {key}.type:{tag_text} expected one of {', '.join(RECEIVER_TYPES)}"
    written = value_at(values, location)
    message = expectation(error, written)
    if not key:
        setting, _, problem = message.partition(": ")
        flag = origin.get(setting, "")
        return f"{flag}: {problem}" if flag.startswith("--") else f"{place}: {message}"
    value = error["input"] if written is None else written
    is_hidden = message == MISSING or isinstance(value, (dict, list)) or location[-1] in ("url", "metrics_url")
    value_text = "" if is_hidden else f" {value!r:.80}"
    if place.startswith(("--", "environment variable ")):
        return f"{place}{value_text}: {message}"  # it names the key
    return f"{place}: {key}:{value_text}{':' if value_text else ''} {message}"


log = logging.getLogger(__name__)

COPY_NAME = "last-configuration.yaml"
"""Name of the copy in the state directory. It may contain secrets, so only its owner can read it."""
COPY_HEADER = "# the last content of {} that could be loaded; gpumond replaces this file\n"


class LastValidFile(NamedTuple):
    """Settings of the copy are in effect, because the file could not be loaded.

    ``error``: the reason. ``place``: that in the file, without values. ``loaded_at``: Unix seconds at which the copy
    was written.
    """

    error: str
    place: str
    loaded_at: float


@dataclass(frozen=True, slots=True)
class ConfigurationFile:
    """``path``: the file, if there is one. ``flags`` are those of the command, which override the file."""

    path: Path | None
    flags: Mapping[str, Any]

    def load(self) -> Settings:
        """Load the file, and keep a copy. Raises ConfigError, also if the file's web configuration is invalid."""
        text = None
        if self.path is not None:
            try:
                text = read_text(self.path)
            except (OSError, ValueError):
                pass  # load states the reason
        settings = load_settings(self.path, self.flags, content=text)
        settings.web()
        if text is not None:
            self._write_copy(settings.store_file().parent, text)
        return settings

    def load_or_use_copy(self) -> tuple[Settings, LastValidFile | None]:
        """Load the file, or else its copy. Raises the ConfigError of the file if the copy cannot be used, either."""
        try:
            return self.load(), None
        except ConfigError as error:
            copy = self._load_copy()
            if copy is None:
                raise
            settings, loaded_at = copy
            return settings, LastValidFile(str(error), error.place, loaded_at)

    def _write_copy(self, directory: Path, text: str) -> None:
        content = COPY_HEADER.format(self.path).encode() + text.encode()
        copy = directory / COPY_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(copy, content)
        except OSError as error:
            log.warning("can't keep a copy of the configuration: %s: %s", copy, error.strerror)

    def _load_copy(self) -> tuple[Settings, float] | None:
        """Return the settings of the copy and when it was written; None if there is no copy of this file.

        The state directory is that of the flags and the environment, because the file could not be loaded.
        """
        try:
            copy = load_settings(None, self.flags).store_file().parent / COPY_NAME
            text = read_text(copy)
            if not text.startswith(COPY_HEADER.format(self.path)):
                return None
            settings = load_settings(self.path, self.flags, content=text)
            settings.web()
            return settings, copy.stat().st_mtime
        except (ConfigError, OSError, ValueError):
            return None
