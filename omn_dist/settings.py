"""Settings: frozen dataclasses that are filled from YAML and from keyword overrides.

Every settings class of the package is a frozen keyword-only dataclass. The functions here fill one
from a nested mapping, check the types, and suggest the nearest known key for an unknown one.
"""

import dataclasses
import difflib
import importlib
import numbers
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_NUMBERS: Mapping[Any, Any] = {int: numbers.Integral, float: numbers.Real}


class SettingsError(ValueError):
    """A setting that cannot be used. One line: which one, found, expected, what to do."""


def unknown_name(kind: str, found: str, known: typing.Iterable[str]) -> str:
    """The message for a name that is not among ``known``. It suggests the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {found!r}{hint} (known: {', '.join(names)})"


def from_mapping(cls: type[T], values: Mapping[str, Any] | None, *, path: str = "") -> T:
    """Build the settings dataclass ``cls``; nested dataclasses are built from nested mappings.

    Args:
        cls: a dataclass. Its fields without a default must be in ``values``.
        values: the mapping; ``None`` stands for an empty one.
        path: dotted name of this mapping within the whole configuration, for messages.

    Raises:
        SettingsError: an unknown key (the nearest one is suggested), a missing key, or a value of
            the wrong type.
    """
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise SettingsError(f"{path or 'configuration'}: found {values!r}, expected a mapping of {cls.__name__} fields")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in fields:
            raise SettingsError(unknown_name("key", f"{prefix}{key}", (f"{prefix}{name}" for name in fields)))
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = convert(hints[name], values[name], path=f"{prefix}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SettingsError(f"{prefix}{name}: missing, expected a value; add it to the configuration")
    return cls(**arguments)


def replace(settings: T, overrides: Mapping[str, Any], *, path: str = "") -> T:
    """A copy of ``settings`` with the fields in ``overrides``, checked like those of a mapping."""
    hints = typing.get_type_hints(type(settings))
    names = [field.name for field in dataclasses.fields(settings)]  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    converted: dict[str, Any] = {}
    for key, value in overrides.items():
        if key not in names:
            raise SettingsError(unknown_name("field", f"{prefix}{key}", (f"{prefix}{name}" for name in names)))
        converted[key] = convert(hints[key], value, path=f"{prefix}{key}")
    return dataclasses.replace(settings, **converted)  # type: ignore[type-var]


def convert(hint: Any, value: Any, *, path: str) -> Any:
    """``value`` as the annotated type ``hint``.

    Numbers of other libraries, integers and numbers in strings become floats, and lists become
    tuples, where the type says so.

    Raises:
        SettingsError: a value of another type; the message starts with ``path``.
    """
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        kinds = [option for option in parameters if dataclasses.is_dataclass(option)]
        if kinds and isinstance(value, Mapping):
            # The dataclass with most of these keys is the one that was meant.
            return convert(max(kinds, key=lambda kind: len(kind.__dataclass_fields__.keys() & value.keys())), value, path=path)
        for option in parameters:
            try:
                return convert(option, value, path=path)
            except SettingsError:
                continue
    elif origin is typing.Literal:
        if any(value is choice or (type(value) is type(choice) and value == choice) for choice in parameters):
            return value
        if isinstance(value, str):
            raise SettingsError(f"{path}: {unknown_name('choice', value, map(str, parameters))}")
    elif origin is tuple and isinstance(value, list | tuple):
        if len(parameters) == 2 and parameters[1] is Ellipsis:
            return tuple(convert(parameters[0], item, path=f"{path}[{i}]") for i, item in enumerate(value))
        if len(parameters) == len(value):
            return tuple(
                convert(part, item, path=f"{path}[{i}]") for i, (part, item) in enumerate(zip(parameters, value, strict=True))
            )
    elif origin in (dict, Mapping) or origin is typing.get_origin(Mapping[str, Any]):
        if isinstance(value, Mapping):
            return {key: convert(parameters[1], item, path=f"{path}.{key}") for key, item in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_mapping(hint, value, path=path)
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-5 as a string.
        try:
            return float(value)
        except ValueError:
            pass
    elif hint in _NUMBERS and type(value) is not bool and isinstance(value, _NUMBERS[hint]):
        return hint(value)
    elif isinstance(hint, type) and isinstance(value, hint) and hint not in _NUMBERS:
        return value
    expected = hint.__name__ if isinstance(hint, type) and not parameters else str(hint).replace("typing.", "")
    raise SettingsError(f"{path}: found {value!r}, expected {expected}")


def import_module(name: str, *, path: str) -> types.ModuleType:
    """Import the module that a setting names, from the working directory or the Python path.

    Args:
        name: as in ``import NAME``. A module that is loaded already is not loaded again.
        path: dotted name of the setting, for the message.

    Raises:
        SettingsError: the module is not found, or its own code raises.
    """
    # A console script does not look into the working directory by itself.
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except Exception as error:  # code of the user
        first_line = (str(error).splitlines() or ["no message"])[0]
        raise SettingsError(
            f"{path}: cannot import {name!r} ({type(error).__name__}: {first_line}), expected a module in the working directory "
            "or on PYTHONPATH; correct the name or the module"
        ) from error
    finally:
        sys.path.remove("")
