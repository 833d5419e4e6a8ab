"""The fast decoder for messages of agents, which arrive in large numbers: pydantic-core checks and builds them.

The schema is made from the types' own annotations, as in `messages`. Agents use the decoder of `messages`, since they
have the standard library only. This one takes a quarter of its time. What it rejects is decoded by `messages`, which
explains the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic_core import SchemaValidator, ValidationError
from pydantic_core.core_schema import (
    CoreSchema,
    DataclassField,
    bool_schema,
    dataclass_args_schema,
    dataclass_field,
    dataclass_schema,
    float_schema,
    int_schema,
    literal_schema,
    no_info_after_validator_function,
    nullable_schema,
    str_schema,
    tagged_union_schema,
    tuple_variable_schema,
    with_default_schema,
)

from gpumond.facts import messages
from gpumond.facts.messages import MAX_INTEGER, MAX_TEXT, MESSAGES, VERSION, Message
from gpumond.facts.program import ByteChange

_BEGINNING = b'{"v":%d,"type":"' % VERSION


def decode(line: bytes) -> Message:
    """Decode a message of an agent, as `messages.decode` does."""
    if line.startswith(_BEGINNING):
        try:
            message: Message = _messages().validate_json(line)
            return message
        except ValidationError:
            pass
    return messages.decode(line)


@cache
def _messages() -> SchemaValidator:
    return SchemaValidator(tagged_union_schema({name: _schema(cls) for name, cls in MESSAGES.items()}, "type"))


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not printable")
    return text


_SCALARS: Mapping[Any, CoreSchema] = {
    int: int_schema(strict=True, ge=0, lt=MAX_INTEGER),
    ByteChange: int_schema(strict=True, gt=-MAX_INTEGER, lt=MAX_INTEGER),
    float: float_schema(strict=True, allow_inf_nan=False),
    str: no_info_after_validator_function(_printable, str_schema(strict=True, max_length=MAX_TEXT)),
    bool: bool_schema(strict=True),
}


def _schema(hint: Any) -> CoreSchema:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return _dataclass_schema(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return literal_schema(list(arguments))
    if origin is tuple:
        return tuple_variable_schema(_schema(arguments[0]))
    if all(map(messages.is_text, arguments)):
        return _SCALARS[str]
    return nullable_schema(_schema(arguments[0]))


def _dataclass_schema(cls: Any) -> CoreSchema:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    arguments: list[DataclassField] = []
    for field in fields(cls):
        own = _schema(hints[field.name])
        if field.default is not MISSING:
            own = with_default_schema(own, default=field.default)
        arguments.append(dataclass_field(field.name, own))
    schema = dataclass_args_schema(cls.__name__, arguments, extra_behavior="ignore")
    return dataclass_schema(cls, schema, names, slots=True, strict=True)
