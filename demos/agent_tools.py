"""The tools of 03_agent_loop.py: they really read, calculate and query, and are safe to point a model at."""

from __future__ import annotations

import ast
import json
import operator
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Number = int | float
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _schema(tool: str, description: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": tool, "description": description, "parameters": parameters}}


TOOLS = [
    _schema("list_files", "Names of the files in the folder."),
    _schema("read_file", "The text of a file in the folder.", name="file name"),
    _schema("calculate", "The value of an arithmetic expression.", expression="such as 3 * (4 + 5)"),
    _schema("query", "Rows of the SQLite table sales(month, product, pieces, price).", sql="one SELECT"),
]


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression of numbers, + - * / % ** and brackets. Raises ValueError for all else."""

    def value(node: ast.expr) -> Number:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if abs(value(right)) > 100:
                raise ValueError(f"the exponent of {ast.unparse(left)} is above 100")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                result: Number = _BINARY[type(op)](value(left), value(right))
                return result
            case _:
                raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    return value(ast.parse(expression, mode="eval").body)


def read_file(folder: Path, name: str) -> str:
    """The text of a file. Raises ValueError for a name that leads out of the folder."""
    path = (folder / name).resolve()
    if path.parent != folder.resolve():
        raise ValueError(f"{name!r} is not in the folder")
    return path.read_text("utf-8")


def sales_table(database: sqlite3.Connection) -> sqlite3.Connection:
    """Fill the table `sales`: six months, four products; then writing is switched off."""
    database.execute("CREATE TABLE sales (month TEXT, product TEXT, pieces INTEGER, price REAL)")
    products = (("Trail 540", 9, 1349.0), ("Fjord 3", 14, 799.0), ("HG-222", 31, 24.5), ("MG-29-L", 22, 61.5))
    rows = [
        (f"2025-{month:02}", product, pieces + month * (place + 1) % 5, price)
        for month in range(1, 7)
        for place, (product, pieces, price) in enumerate(products)
    ]
    database.executemany("INSERT INTO sales VALUES (?, ?, ?, ?)", rows)
    database.commit()
    database.execute("PRAGMA query_only = ON")
    return database


def run_tool(function: Mapping[str, Any], folder: Path, database: sqlite3.Connection) -> str:
    """Run one call; what goes wrong is the tool's result, as an agent expects it."""
    try:
        args = json.loads(function["arguments"])
        match function["name"]:
            case "list_files":
                return "\n".join(sorted(path.name for path in folder.iterdir()))
            case "read_file":
                return read_file(folder, args["name"])
            case "calculate":
                return str(calculate(args["expression"]))
            case "query":
                return json.dumps(database.execute(args["sql"]).fetchall())
            case name:
                return f"error: no tool {name!r}"
    except (ArithmeticError, KeyError, OSError, SyntaxError, ValueError, sqlite3.Error) as exc:
        return f"error: {exc}"
