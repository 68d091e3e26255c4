"""What is installed: every package, its type marker, and nothing under the bare names `store` and `policies`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "compaction": ROOT / "compaction",
    "compaction.store": ROOT / "store",
    "compaction.policies": ROOT / "policies",
}
NEEDED_TO_BUILD = ("pyproject.toml", "LICENSE", "README.md", "compaction", "store", "policies")


def packages_on_disk() -> set[str]:
    """Every folder that holds Python files, under the name it is imported by."""
    found = set()
    for name, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            inner = path.parent.relative_to(folder).parts
            found.add(".".join([name, *inner]))
    return found


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with further environment variables and return what it said."""
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built in a copy so that no build/ folder is left behind, without network."""
    source = tmp_path_factory.mktemp("source")
    for name in NEEDED_TO_BUILD:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    target = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-c", code, str(target), cwd=source)
    if built.returncode:
        pytest.fail(built.stderr)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", str(target)]
    done = run(*pip, str(wheel), cwd=target)
    if done.returncode:
        pytest.fail(done.stderr)
    return target


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A user's folder with modules of their own called store and policies."""
    for name in ("store.py", "policies.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module was imported')\n")
    return tmp_path


def test_package_list_equals_the_folders() -> None:
    """pyproject.toml lists each package there is: one that is missing works in a checkout and fails for users."""
    listed = read_configuration(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]

    assert set(listed) == packages_on_disk()


@pytest.mark.parametrize("name", ["store", "policies"])
def test_links_lead_to_the_folders_at_the_root(name: str) -> None:
    """Type checkers and a bare checkout see store/ and policies/ where they are imported from."""
    assert (ROOT / "compaction" / name).readlink() == Path("..", name)


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    """The wheel holds each module under compaction/, the type marker, and nothing at the bare names."""
    expected = {
        "/".join([*name.split("."), path.relative_to(folder).as_posix()])
        for name, folder in SOURCES.items()
        for path in folder.rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert sorted(names) == sorted({*expected, "compaction/py.typed"})


def test_wheel_works_beside_a_users_own_store(installed: Path, hostile: Path) -> None:
    """In a folder with a store.py and a policies.py of the user's, the installed library imports its own."""
    code = "import compaction, compaction.store, compaction.policies; print(compaction.store.__file__)"
    done = run(sys.executable, "-c", code, cwd=hostile, PYTHONPATH=str(installed))

    assert (done.stderr, Path(done.stdout.strip())) == ("", installed / "compaction" / "store" / "__init__.py")


def test_command_line_works_beside_a_users_own_store(installed: Path, hostile: Path) -> None:
    """`python -m compaction --help` answers from the installed wheel in such a folder."""
    done = run(sys.executable, "-m", "compaction", "--help", cwd=hostile, PYTHONPATH=str(installed))

    assert (done.stderr, done.stdout.startswith("Usage:")) == ("", True)


@pytest.mark.parametrize("name", ["store", "policies"])
def test_bare_import_is_refused(name: str) -> None:
    """From the repository's root, `import store` fails and says under which name to import it."""
    done = run(sys.executable, "-c", f"import {name}", cwd=ROOT)

    assert f"compaction.{name}" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")


def test_coverage_reports_all_three_folders(tmp_path: Path) -> None:
    """Coverage follows compaction/, store/ and policies/: naming the first alone leaves out the other two."""
    data = {"COVERAGE_FILE": str(tmp_path / "coverage")}
    code = "import compaction.store, compaction.policies"
    (tmp_path / "measured.py").write_text(code)
    run(sys.executable, "-m", "coverage", "run", str(tmp_path / "measured.py"), cwd=ROOT, **data)
    run(sys.executable, "-m", "coverage", "combine", cwd=ROOT, **data)
    report = run(sys.executable, "-m", "coverage", "report", "--skip-empty", "--no-skip-covered", cwd=ROOT, **data)

    folders = {line.split("/")[0] for line in report.stdout.splitlines() if "/" in line}
    assert folders == {"compaction", "store", "policies"}
