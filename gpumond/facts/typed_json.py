"""Validation of decoded JSON against types: of messages, readings and recorded snapshots, and of daemons' answers.

A `Validator` compiles each annotation once to a function that checks and converts a value. What it accepts for numbers
and texts, and what it makes of an object, depends on who sends the JSON: see `gpumond.facts.messages` and
`gpumond.view.frame`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

Converter = Callable[[Any], Any]

ABSENT = object()


class Mismatch(Exception):
    """A value of a wrong type: ``value`` instead of ``expected``, which is empty for a key that is missing.

    The path is added while the exception propagates: building it for each value would cost more than all checks.
    """

    def __init__(self, expected: str, value: object = ABSENT, path: str = "") -> None:
        super().__init__(expected)
        self.expected, self.value, self.path = expected, value, path


class Validator:
    """``scalars``: the converters of int, float, str, bool, and of NewTypes that differ from their supertype.

    ``literal`` returns the converter for the values of a Literal, and ``default`` the value for the key of a field that
    is absent: ABSENT leaves it out, MISSING is a mismatch. ``record`` makes the result of an object, ``sequence`` that
    of an array.
    """

    def __init__(
        self,
        scalars: Mapping[Any, Converter],
        literal: Callable[[tuple[Any, ...]], Converter],
        default: Callable[[Any, Any], Any],
        record: Callable[[Any, dict[str, Any]], Any],
        sequence: Callable[[list[Any]], Any],
    ) -> None:
        self._scalars, self._literal, self._default = scalars, literal, default
        self._record, self._sequence = record, sequence
        self._compiled: dict[Any, Converter] = {}

    def converter(self, hint: Any) -> Converter:
        """Return the converter for a type. It raises Mismatch. Raises TypeError for a type without a JSON form."""
        if hint not in self._compiled:
            self._compiled[hint] = self._compile(hint)
        return self._compiled[hint]

    def _compile(self, hint: Any) -> Converter:
        if hint in self._scalars:
            return self._scalars[hint]
        if isinstance(hint, NewType):
            return self.converter(hint.__supertype__)
        if is_dataclass(hint):
            return self._object(hint)
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Literal:
            return self._literal(arguments)
        if origin is tuple and arguments[1:] == (...,):
            return self._array(self.converter(arguments[0]))
        if origin is tuple and arguments:
            return self._row(tuple(map(self.converter, arguments)))
        if origin in (Union, types.UnionType):
            members = [each for each in arguments if each is not type(None)]
            is_text = len(members) > 1 and all(map(_is_text, members))
            alternatives = {self._scalars[str]} if is_text else set(map(self.converter, members))
            if len(alternatives) == 1:
                (inner,) = alternatives
                return (
                    (lambda value: None if value is None else inner(value)) if len(members) < len(arguments) else inner
                )
        raise TypeError(f"no JSON form for {hint}")

    def _object(self, cls: Any) -> Converter:
        hints = get_type_hints(cls)
        entries = [
            (field.name, self.converter(hints[field.name]), self._default(field, hints[field.name]))
            for field in fields(cls)
        ]
        record = self._record

        def convert(value: Any) -> Any:
            if type(value) is not dict:
                raise Mismatch("an object", value)
            values = {}
            for name, convert_field, default in entries:
                if name in value:
                    try:
                        values[name] = convert_field(value[name])
                    except Mismatch as mismatch:
                        mismatch.path = f".{name}{mismatch.path}"
                        raise
                elif default is MISSING:
                    raise Mismatch("", path=f".{name}")
                elif default is not ABSENT:
                    values[name] = default
            return record(cls, values)

        return convert

    def _array(self, inner: Converter) -> Converter:
        sequence = self._sequence

        def convert(value: Any) -> Any:
            if type(value) is not list:
                raise Mismatch("an array", value)
            return sequence([inner(entry) for entry in value])

        return convert

    def _row(self, converters: Sequence[Converter]) -> Converter:
        def convert(value: Any) -> Any:
            if type(value) is not list or len(value) != len(converters):
                raise Mismatch(f"an array of {len(converters)}", value)
            return self._sequence([converter(entry) for converter, entry in zip(converters, value, strict=True)])

        return convert


def _is_text(hint: Any) -> bool:
    """Return whether a type is a NewType of str or a literal of strings. A union of these accepts every string."""
    if get_origin(hint) is Literal:
        return all(isinstance(value, str) for value in get_args(hint))
    return getattr(hint, "__supertype__", None) is str
