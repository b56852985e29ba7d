"""The events that the package logs, read off its source: logger, level and the facts that stand in the call."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "durable_core"
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}

OF_AN_ATTEMPT = ("row_id", "kind", "fence", "attempt", "max_attempts", "duration_s")
"""What `_Attempt._facts` adds."""

OF_AN_EXECUTION = ("row_id", "kind", "step", "execution_id")
"""What `Running._of_case` adds."""


@dataclass
class Event:
    """One event: where and how it is logged, at all the places that do."""

    loggers: set[str] = field(default_factory=set)
    levels: set[str] = field(default_factory=set)
    facts: set[str] = field(default_factory=set)


@cache
def events() -> dict[str, Event]:
    """Every event of a logger of operation, by its name. Fails for one whose name is not in the source."""
    found: dict[str, Event] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        logger = _logger(tree)
        if logger is None:
            continue
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
            for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                method = _method(call)
                if method is None:
                    continue
                levels, said = ({LEVELS[method]}, call.args[0]) if method != "log" else (set(), call.args[1])
                names = _texts(said) or _assigned(function, said)
                assert names, f"{path}:{call.lineno} logs something that is no name"
                for name in names:
                    event = found.setdefault(name, Event())
                    event.loggers.add(logger)
                    event.levels |= levels
                    event.facts |= _facts(call, function)
    return found


def _logger(tree: ast.Module) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "log":
            (argument,) = node.value.args  # type: ignore[attr-defined]
            return argument.value if isinstance(argument, ast.Constant) else None
    return None


def _method(call: ast.Call) -> str | None:
    inner = call.func
    if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "log" and inner.attr in {*LEVELS, "log"}:
        return inner.attr
    return None


def _texts(node: ast.expr) -> set[str]:
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp():
            return _texts(node.body) | _texts(node.orelse)
        case ast.Subscript(value=ast.Dict(values=values)):
            return set().union(*map(_texts, values))
    return set()


def _assigned(function: ast.AST, name: ast.expr) -> set[str]:
    return set().union(
        *(
            _texts(node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(name)
        )
    )


def _facts(call: ast.Call, function: ast.AST) -> set[str]:
    """The keys of `extra`, those of dictionaries included that stand in the function under a name."""
    facts: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg == "extra":
            names = {node.id for node in ast.walk(keyword.value) if isinstance(node, ast.Name)}
            named = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names
            ]
            for node in [inner for value in (keyword.value, *named) for inner in ast.walk(value)]:
                if isinstance(node, ast.Dict):
                    facts |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._facts":
                    facts |= {*OF_AN_ATTEMPT, *(one.arg for one in node.keywords if one.arg)}
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._of_case":
                    facts |= {*OF_AN_EXECUTION, *(one.arg for one in node.keywords if one.arg)}
    return facts
