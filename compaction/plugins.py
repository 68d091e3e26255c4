"""Policies by name, those of other packages included.

Invariant: built-in policies are known without any installed metadata, and no package can put its own in their place.
Third parties register a factory (a policy class, or a function that takes the parameters by keyword) under the
entry-point group `compaction.policies`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter
from typing import Any

from compaction.errors import InvalidPolicy
from compaction.policies import BUILTIN, Factory, make, parameters
from compaction.ports import Policy

__all__ = ["GROUP", "make_policy", "parse_policy", "policies"]

GROUP = "compaction.policies"


def policies() -> dict[str, Factory]:
    """All factories by name, built-in ones first, then those of other packages in the order of their names.

    Raises InvalidPolicy where two packages claim a name, or where one cannot be loaded.
    """
    found: dict[str, Factory] = dict(BUILTIN)
    claimed: dict[str, tuple[str, str]] = dict.fromkeys(BUILTIN, ("kv-compaction", "built in"))
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        claim = (_origin(point), point.value)
        if claim == claimed.get(point.name):  # one package seen twice on the path
            continue
        if point.name in claimed:
            first = claimed[point.name][0]
            raise InvalidPolicy(f"policy {point.name!r} is claimed by {first} and by {claim[0]}: uninstall one of them")
        found[point.name], claimed[point.name] = _load(point), claim
    return found


def make_policy(name: str, params: Mapping[str, Any] | None = None) -> Policy:
    """The policy of that name with these parameters, checked.

    Raises InvalidPolicy for an unknown name or parameter, or a value that cannot be.
    """
    known = BUILTIN if name in BUILTIN and not _holds_policies(params) else policies()
    return make(name, params, known)


def parse_policy(text: str) -> Policy:
    """A policy from a command line: "truncate", "sliding_window:sinks=2,keep_last=4", or a JSON object after the colon.

    A list is written with plus signs ("clear_tool_results:exclude=grep+read_file", "pipeline:stages=truncate+noop"); a
    comma inside a value needs JSON.
    Raises InvalidPolicy with what is wrong and what would be right.
    """
    name, _, rest = text.strip().partition(":")
    rest = rest.strip()
    if rest.startswith("{"):
        return make_policy(name, _policies_named(name, _from_json(name, rest)))
    given: dict[str, Any] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise InvalidPolicy(f"{name}: cannot read {item!r}: write parameters as name=value,name=value")
        if key in given:
            raise InvalidPolicy(f"{name}: parameter {key!r} is given twice")
        given[key] = value
    return make_policy(name, _policies_named(name, _lists_split(name, given)))


def _from_json(name: str, text: str) -> dict[str, Any]:
    try:
        params = json.loads(text)
    except ValueError as exc:
        raise InvalidPolicy(f"{name}: parameters are not JSON: {exc}") from exc
    return dict(params)


def _takes(name: str) -> dict[str, Parameter]:
    factory = BUILTIN.get(name) or policies().get(name)
    return parameters(factory) if factory is not None else {}


def _lists_split(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Values for parameters that hold several, as lists: `a+b`."""
    takes = _takes(name) if given else {}
    several = {key for key, p in takes.items() if isinstance(p.default, tuple) or "Sequence" in str(p.annotation)}
    return {key: [v for v in value.split("+") if v] if key in several else value for key, value in given.items()}


def _policies_named(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Bare names where policies are wanted become descriptions: `stages=truncate+noop`, `first=summarize`."""
    takes = _takes(name) if given else {}

    def described(value: Any) -> Any:
        if isinstance(value, list):
            return [described(item) for item in value]
        return {"name": value} if isinstance(value, str) else value

    wanted = {key for key, parameter in takes.items() if "Policy" in str(parameter.annotation)}
    return {key: described(value) if key in wanted else value for key, value in given.items()}


def _holds_policies(params: Mapping[str, Any] | None) -> bool:
    return any(isinstance(value, list | dict) for value in (params or {}).values())


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _load(point: EntryPoint) -> Factory:
    try:
        factory = point.load()
    except Exception as exc:  # the edge to other people's packages: whatever goes wrong is named after them
        raise InvalidPolicy(f"policy {point.name!r} of {_origin(point)} cannot be loaded: {exc}") from exc
    if not callable(factory):
        raise InvalidPolicy(f"policy {point.name!r} of {_origin(point)} is no factory: {point.value} cannot be called")
    return factory  # type: ignore[no-any-return]
