"""Policies by name: made, and made again, from plain JSON.

Invariant: `make(p.name, p.params, factories) == p` for every policy whose factory is there; unknown names and
parameters are refused with what there is. Knows no policy by itself, and nothing about entry points.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from compaction.errors import InvalidPolicy
from compaction.ports import Policy

__all__ = ["Factory", "make", "parameters"]

Factory = Callable[..., Policy]
"""Takes a policy's parameters by keyword; a policy class is one."""


def make(name: str, params: Mapping[str, Any] | None, factories: Mapping[str, Factory]) -> Policy:
    """The policy of that name with these parameters; `{"name": …, "params": …}` inside them becomes a policy too.

    Raises InvalidPolicy for an unknown name or parameter, or a value that cannot be.
    """
    if name not in factories:
        raise InvalidPolicy(f"unknown policy {name!r}: there are {', '.join(sorted(factories))}")
    factory = factories[name]
    values = _checked(name, factory, params or {})
    return factory(**{key: _nested(value, factories) for key, value in values.items()})


def parameters(factory: Factory) -> dict[str, inspect.Parameter]:
    """The parameters a factory takes, in order."""
    return {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _checked(name: str, factory: Factory, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, checked and converted by the factory's annotations."""
    if not isinstance(params, Mapping):
        raise InvalidPolicy(f"{name}: parameters are a JSON object, not {params!r}")
    takes = parameters(factory)
    if unknown := [key for key in params if key not in takes]:
        has = ", ".join(takes) if takes else "none"
        raise InvalidPolicy(f"{name}: unknown parameter {unknown[0]!r}: its parameters are {has}")
    hints = _hints(factory)
    fields: dict[str, Any] = {key: (_plain(hints.get(key, Any)), ...) for key in params}
    try:
        model = create_model("Parameters", __config__=ConfigDict(extra="forbid"), **fields)(**params)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidPolicy(f"{name}: {where}: {first['msg']}, not {first['input']!r}") from exc
    if missing := [key for key, value in takes.items() if value.default is value.empty and key not in params]:
        raise InvalidPolicy(f"{name}: parameter {missing[0]!r} is missing")
    return {key: getattr(model, key) for key in params}


def _hints(factory: Factory) -> dict[str, Any]:
    try:
        return get_type_hints(factory)
    except (NameError, TypeError):
        return {}


def _plain(hint: Any) -> Any:
    """The part of an annotation that JSON can hold; Any where it is about policies or callables."""
    if hint in (int, float, bool, str, type(None), Any):
        return hint
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        plain = tuple(arg for arg in args if _plain(arg) is arg)
        return Union[plain] if plain else Any  # noqa: UP007 - made at run time, from a tuple
    if origin is tuple and all(arg is Ellipsis or _plain(arg) is arg for arg in args):
        return hint
    return Any


def _nested(value: Any, factories: Mapping[str, Factory]) -> Any:
    """Descriptions of policies made into policies."""
    if isinstance(value, Mapping) and "name" in value and set(value) <= {"name", "params"}:
        return make(value["name"], value.get("params"), factories)
    if isinstance(value, list):
        return [_nested(item, factories) for item in value]
    return value
