"""The names scripts and users rely on, where DESIGN.md promises them, and nothing exported by accident."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import compaction

PUBLIC = {
    "compaction": ["Budget", "Session", "SessionManager", "compact"],
    "compaction.engines": ["TransformersEngine"],
    "compaction.policies": [
        "ClearToolResults",
        "Pipeline",
        "SlidingWindow",
        "Summarize",
        "Truncate",
        "default_policy",
    ],
    "compaction.store": ["AuditLog", "MemoryLog"],
}


def library_modules() -> list[str]:
    """Every module of the library; `__main__` runs the program when imported."""
    found = pkgutil.walk_packages(compaction.__path__, "compaction.")
    return ["compaction", *(item.name for item in found if not item.name.endswith("__main__"))]


def load(name: str) -> ModuleType:
    """The module, for tests that look at what it exports."""
    return importlib.import_module(name)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names])
def test_promised_name_is_exported(module: str, name: str) -> None:
    """Each promised name can be imported, and stands in `__all__`."""
    exported = load(module)

    assert (hasattr(exported, name), name in exported.__all__) == (True, True)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_ours(module: str) -> None:
    """No class or function of somebody else's is re-exported."""
    exported = load(module)
    values = {name: getattr(exported, name) for name in exported.__all__}

    assert [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__module__.startswith("compaction")
    ] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_dir_shows_lazy_names(module: str) -> None:
    """`dir()` lists what can be imported, also where it is loaded only when asked for."""
    exported = load(module)

    assert set(exported.__all__) <= set(dir(exported))


@pytest.mark.parametrize("module", PUBLIC)
def test_unknown_name_is_an_attribute_error(module: str) -> None:
    """A name that does not exist is an AttributeError naming module and name, as `hasattr` needs it."""
    with pytest.raises(AttributeError, match=rf"'{module}'.*'no_such_name'"):
        _ = load(module).no_such_name


@pytest.mark.parametrize("module", library_modules())
def test_all_names_exist(module: str) -> None:
    """What a module's `__all__` names is there."""
    exported = load(module)

    assert [name for name in getattr(exported, "__all__", ()) if not hasattr(exported, name)] == []


def test_star_import_gives_the_public_names() -> None:
    """`from compaction import *` gives what `__all__` says."""
    namespace: dict[str, object] = {}
    exec("from compaction import *", namespace)

    assert set(load("compaction").__all__) <= set(namespace)
