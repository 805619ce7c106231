"""Strict JSON for frozen dataclasses.

What a type does not say is refused: an unknown or missing field, a number for a string, a value that the
type's own checks reject.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import pendulum
from pendulum import DateTime

from arroyo_dagster.errors import DamagedObjectError
from arroyo_dagster.model import JsonValue, ObjectPath

T = TypeVar("T")
Decoder: TypeAlias = Callable[[Any], Any]


def encode(value: object) -> JsonValue:
    """Turn a value, or a dataclass of values, into JSON."""
    match value:
        case Enum():
            return encode(value.value)
        case None | bool() | int() | float():
            return value
        case str():
            return str(value)
        case DateTime():
            return value.in_timezone("UTC").isoformat()
        case tuple() | list():
            return [encode(item) for item in value]
        case Mapping():
            return {str(key): encode(item) for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value):
            return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON form")


def decode(kind: type[T], data: JsonValue, where: str) -> T:
    """Turn JSON back into a value of `kind`. `where` names the object in errors."""
    try:
        return cast("T", _decoder(cast("Any", kind))(data))
    except (ValueError, OverflowError) as error:
        raise DamagedObjectError(f"{where} is not a valid {kind.__name__}: {error}") from error


@cache
def _decoder(kind: Any) -> Decoder:
    """Build, once for each type, the function that turns JSON into it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _SCALARS:
        return _scalar(*_SCALARS[kind])
    if dataclasses.is_dataclass(kind):
        return _record(cast("type[Any]", kind))
    if origin is tuple and arguments[1:] == (...,):
        return _list_of(_decoder(arguments[0]))
    if origin is tuple:
        return _fixed(tuple(_decoder(argument) for argument in arguments))
    if origin is Mapping:
        return _mapping(_KEYS[arguments[0]], _decoder(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return cast("Decoder", kind)
    if {NoneType, bool, int, float, str} <= set(arguments):  # JsonValue
        return lambda data: data
    if origin in {Union, UnionType} and len(arguments) == 2 and NoneType in arguments:
        return _optional(_decoder(next(argument for argument in arguments if argument is not NoneType)))
    raise TypeError(f"{kind} has no JSON form")


def _time(text: str) -> DateTime:
    time = pendulum.instance(datetime.fromisoformat(text)).in_timezone("UTC")
    if time.isoformat() != text:
        raise ValueError(f"{text!r} is not a UTC timestamp as this library writes them")
    return time


def _number(key: str) -> int:
    if key != str(int(key)):
        raise ValueError(f"{key!r} is not a number as this library writes them")
    return int(key)


_SCALARS: dict[Any, tuple[type, Decoder]] = {
    bool: (bool, lambda data: data),
    int: (int, lambda data: data),
    str: (str, lambda data: data),
    ObjectPath: (str, ObjectPath),
    DateTime: (str, _time),
}
_KEYS: dict[Any, Decoder] = {str: str, int: _number}


def _scalar(expected: type, convert: Decoder) -> Decoder:
    def run(data: Any) -> Any:
        if type(data) is not expected:
            raise ValueError(f"{data!r} is not of type {expected.__name__}")
        return convert(data)

    return run


def _record(kind: type[Any]) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(kind)}

    def run(data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"{kind.__name__} is not a JSON object")
        if data.keys() != decoders.keys():
            odd = [f"unknown field {name!r}" for name in sorted(data.keys() - decoders.keys())]
            odd += [f"missing field {name!r}" for name in sorted(decoders.keys() - data.keys())]
            raise ValueError(f"{kind.__name__} has {', '.join(odd)}")
        values = {}
        for name, decoder in decoders.items():
            try:
                values[name] = decoder(data[name])
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from error
        return kind(**values)

    return run


def _list_of(item: Decoder) -> Decoder:
    def run(data: Any) -> Any:
        if not isinstance(data, list):
            raise ValueError(f"{data!r} is not a list")
        return tuple(item(element) for element in data)

    return run


def _fixed(items: tuple[Decoder, ...]) -> Decoder:
    def run(data: Any) -> Any:
        if not isinstance(data, list) or len(data) != len(items):
            raise ValueError(f"{data!r} is not a list of {len(items)}")
        return tuple(item(element) for item, element in zip(items, data, strict=True))

    return run


def _mapping(key: Decoder, item: Decoder) -> Decoder:
    def run(data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"{data!r} is not a JSON object")
        return {key(name): item(element) for name, element in data.items()}

    return run


def _optional(present: Decoder) -> Decoder:
    return lambda data: None if data is None else present(data)
