"""`compaction policies`: what is installed, and its parameters."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.policies import Factory

__all__ = ["policies"]


@click.command(short_help="The installed policies and their parameters.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def policies(name: str | None, as_json: bool) -> None:
    """List the installed policies, or tell all about the policy NAME.

    Give one to `run` or `chat` as --policy NAME, or NAME:param=value,param=value; a list is written a+b, and anything
    deeper as JSON after the colon. Packages add theirs through the entry-point group `compaction.policies`.

    \b
    Examples:
      compaction policies
      compaction policies sliding_window
      compaction run talk.jsonl --budget 2048 --policy sliding_window:sinks=2,keep_last=4

    \b
    JSON keys: policies: [{name, doc, version, parameters: {parameter: {default, type}}}]; with NAME one such object
               (a parameter without a default is required and has no key `default`)
    """
    from compaction.cli.output import console, emit, pairs, table
    from compaction.errors import InvalidPolicy
    from compaction.plugins import policies as installed

    found = installed()
    if name is not None and name not in found:
        raise InvalidPolicy(f"unknown policy {name!r}: there are {', '.join(sorted(found))}")
    rows = [_described(key, found[key]) for key in ([name] if name is not None else found)]
    if as_json:
        emit(rows[0] if name is not None else {"policies": rows})
    elif name is None:
        cells = ((row["name"], row["doc"], _call(row)) for row in rows)
        console().print(table("", ("policy", "what it does", "parameters"), cells))
    else:
        console().print(f"{name}: {inspect.getdoc(found[name]) or 'no description'}\n")
        console().print(pairs("", [(key, _parameter(value)) for key, value in rows[0]["parameters"].items()]))


def _described(name: str, factory: Factory) -> dict[str, Any]:
    from compaction.policies import parameters

    doc = (inspect.getdoc(factory) or "").partition("\n")[0]
    described: dict[str, Any] = {}
    for key, parameter in parameters(factory).items():
        described[key] = {"type": inspect.formatannotation(parameter.annotation).strip("'\"")}
        if parameter.default is not parameter.empty:
            described[key]["default"] = _json(parameter.default)
    return {"name": name, "doc": doc, "version": getattr(factory, "version", None), "parameters": described}


def _json(default: Any) -> Any:
    """A default as JSON; a policy or a callable by its name."""
    if default is None or isinstance(default, bool | int | float | str):
        return default
    if isinstance(default, list | tuple | set | frozenset):
        return [_json(item) for item in default]
    return str(getattr(default, "name", None) or getattr(default, "__name__", None) or type(default).__name__)


def _call(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in row["parameters"].items()) or "none"


def _parameter(value: dict[str, Any]) -> str:
    default = "required" if "default" not in value else f"default {_value(value)}"
    return f"{value['type']}, {default}"


def _value(value: dict[str, Any]) -> str:
    if "default" not in value:
        return "…"
    from compaction.cli.output import plain

    default = value["default"]
    if isinstance(default, list):
        return "+".join(map(str, default)) or "nothing"
    return "none" if default is None else plain(str(default), 60)
