"""Models of what people and programs write, over HTTP or in YAML: their bases, and what a wrong value should have been,
without the words of the libraries that found it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isclose
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    model_validator,
)

from gpumond.facts import units
from gpumond.facts.units import require_encodable


class EncodableModel(BaseModel):
    """Base of the models of request bodies and of the configuration. All text in the input, keys and unknown keys
    included, must be encodable in UTF-8, so each endpoint can write what is stored.
    """

    @model_validator(mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        require_encodable(value)
        return value


Seconds = Annotated[float, BeforeValidator(units.parse_seconds)]


class StrictModel(EncodableModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


MISSING = "missing"
_TYPE_TEXTS: Mapping[str, str] = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "keys and values",
    "mapping": "keys and values",
    "model": "keys and values",
    "model_attributes": "keys and values",
    "dataclass": "keys and values",
    "path": "a path",
    "url": "a URL",
    "bytes": "text",
}
_BOUND_TEXTS: Mapping[str, tuple[str, str]] = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be above"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be below"),
}
_CHARACTER_CLASS = re.compile(r"(?:\^|\\A)\[([^]]+)\]\{(\d+)(?:,(\d+))?\}(?:\$|\\Z|\\z)")
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


def expectation(error: Mapping[str, Any], written: object = None) -> str:
    """Return what an error of pydantic expects, in one clause. ``written``: the value as the user wrote it."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind == "missing":
        return MISSING
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "json_invalid":
        return "invalid JSON"
    if kind in _BOUND_TEXTS:
        name, words = _BOUND_TEXTS[kind]
        return f"{words} {_bound_text(context[name], error['input'], written)}"
    if kind == "string_pattern_mismatch":
        return _pattern_text(context["pattern"])
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}".replace("'", "")
    if kind.endswith(("too_long", "too_short")):
        is_minimum = kind.endswith("too_short")
        number = context["min_length" if is_minimum else "max_length"]
        noun = "character" if kind.startswith("string") else "entry"
        plural = noun if number == 1 else "entries" if noun == "entry" else f"{noun}s"
        return f"must have at {'least' if is_minimum else 'most'} {number} {plural}"
    if kind == "finite_number":
        return "must be a finite number"
    name = kind.removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float").removesuffix("_parsing_size")
    if name in _TYPE_TEXTS:
        quotes = ", in quotes" if name == "string" and isinstance(error.get("input"), (int, float)) else ""
        return f"must be {_TYPE_TEXTS[name]}{quotes}"
    message = str(error["msg"])
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}"


def value_at(values: object, location: Sequence[object]) -> object:
    """Return the value that the user wrote at a location, None if there is none."""
    for part in location:  # a part that the text does not have, such as the type of a receiver, is passed over
        is_inside = part in values if isinstance(values, Mapping) else _is_index(part, values)
        values = values[part] if is_inside else values  # type: ignore[index]
    return None if isinstance(values, (Mapping, list, tuple)) else values


def _is_index(part: object, values: object) -> bool:
    return isinstance(values, (list, tuple)) and isinstance(part, int) and part < len(values)


def _bound_text(bound: float, value: object, written: object) -> str:
    """Return a bound in the form in which the value was written: as a duration, a size, or a number."""
    if isinstance(written, str) and isinstance(value, (int, float)):
        for parse, text_of in ((units.parse_seconds, _duration_text), (units.parse_size, units.size_text)):
            try:
                if not written.strip().isdigit() and isclose(parse(written), value):
                    return text_of(bound)
            except ValueError:
                pass
    return f"{bound:g}"


def _duration_text(seconds: float) -> str:
    unit = next(((size, name) for size, name in _UNITS if seconds >= size and seconds % size == 0), None)
    return f"{seconds / unit[0]:g}{unit[1]}" if unit else f"{seconds * 1000:g}ms"


def _pattern_text(pattern: str) -> str:
    """Describe a pattern of one class of characters; others are shown as they are."""
    match = _CHARACTER_CLASS.fullmatch(pattern)
    if match is None:
        return f"must have the form {pattern.strip('^$')}"
    least, most = match[2], match[3] or match[2]
    count = least if least == most else f"{least} to {most}"
    if match[1] == "!-~":
        return f"expected {count} ASCII characters without spaces"
    allowed = re.findall(r".-.|.", match[1])
    names = allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} and {allowed[-1]}"
    return f"expected {count} characters from {names}"


def parse_yaml(text: str | bytes) -> Any:
    """Return the content of a YAML text.

    Raises yaml.YAMLError, also if a mapping has a key twice: PyYAML would use the last value and lose the first.
    """
    import yaml  # most daemons have no file

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                name = key.tag, key.value
                if name in lines:
                    problem = f"the key {key.value!r} is already on line {lines[name]}"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                lines[name] = key.start_mark.line + 1
            return node

    return yaml.load(text, Loader)  # noqa: S506  # a subclass of the safe loader


def yaml_problem(error: Exception) -> tuple[int | None, str]:
    """Return the line, from 1, and the problem of a text that is not YAML."""
    problem = str(getattr(error, "problem", None) or error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    if "<stream end>" in problem or "end of stream" in problem:
        start_mark = getattr(error, "context_mark", None)
        mark = start_mark or mark
        context = str(getattr(error, "context", ""))
        problem = "unclosed [ or {" if "flow" in context else "unclosed quote" if "scalar" in context else problem
    elif problem == "mapping values are not allowed here":
        problem = "unexpected key; check the indentation, and quote texts that contain ': '"
    elif r"'\t'" in problem:
        problem = "a tab; indent with spaces"
    elif problem.startswith("expected <block end>"):
        problem = "wrong indentation, or an unexpected character"
    return (None if mark is None else mark.line + 1), f"invalid YAML: {problem}"
