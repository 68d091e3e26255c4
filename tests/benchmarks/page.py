"""The page of benchmarks: each figure beside its target, how it was taken, and pictures; written from the JSON."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib

from tests.benchmarks.sections import SECTIONS, Section, Target

__all__ = ["write_page"]

Report = Mapping[str, Any]

_HEAD = """# Benchmarks

Written by `make bench` from `bench.json`; not edited by hand. Comparators run in the same process, alternating with
ours. Figures are medians with their spread from lowest to highest, ratios are those of neighbouring calls.
"""


def write_page(report: Report, page: Path) -> None:
    """Write the page, and its pictures into a folder of the same name beside it."""
    pictures = page.with_suffix("")
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.svg"):
        old.unlink()
    parts = [_HEAD, _summary(report)]
    parts += [
        "\n".join(_section(section, report, pictures)) for section in SECTIONS if section.name in report["sections"]
    ]
    page.write_text("\n".join(parts), encoding="utf-8")


def _summary(report: Report) -> str:
    kept = [(section, name) for section in SECTIONS for name in section.targets if name in _figures(section, report)]
    missed = [name for section, name in kept if not section.targets[name].met(_figures(section, report)[name])]
    said = f"{len(kept) - len(missed)} of {len(kept)} targets met"
    return f"{said}{': missed ' + ', '.join(f'`{name}`' for name in missed) if missed else ''}.\n"


def _figures(section: Section, report: Report) -> Mapping[str, Any]:
    figures: Mapping[str, Any] = report["sections"].get(section.name, {}).get("figures", {})
    return figures


def _section(section: Section, report: Report, folder: Path) -> Iterator[str]:
    ran, module = report["sections"][section.name], section.module()
    yield f"## {section.title}\n"
    yield (inspect.getdoc(module) or "").strip() + "\n"
    machine = ran["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load {machine['load']:.1f}"
    yield f"{ran['at']}, {where}.\n"
    yield "| figure | median | spread | target | | beside |"
    yield "|---|--:|---|---|---|---|"
    for name, figure in ran["figures"].items():
        yield _row(name, figure, section.targets.get(name))
    yield ""
    draw = getattr(module, "draw", None)
    matplotlib.rcParams["svg.hashsalt"] = section.name  # the same figures give the same file
    for picture in draw(ran["figures"]) if draw else ():
        picture.figure.savefig(folder / f"{picture.name}.svg", bbox_inches="tight", metadata={"Date": None})
        yield f"![{picture.caption}]({folder.name}/{picture.name}.svg)\n"


def _row(name: str, figure: Mapping[str, Any], target: Target | None) -> str:
    key = target.key if target else next((known for known in ("ratio", "kl") if known in figure), "ratio")
    if key not in figure:
        return f"| `{name}` | {figure.get('skipped', '')} | | | | |"
    spread = figure.get("spread") if key == "ratio" else figure.get(f"{key}_spread")
    if key == "kl":
        spread = [figure["kl"] - figure["error"], figure["kl"] + figure["error"]]
    shown = f"{_number(spread[0])} to {_number(spread[1])}" if spread else ""
    goal = f"{target.direction} {target.value:,g}" if target else ""
    verdict = ("met" if target.met(figure) else "**missed**") if target else ""
    unit = "" if key in ("ratio", "kl") else f" {key.rpartition('_')[2]}"
    return f"| `{name}` | {_number(figure[key])}{unit} | {shown} | {goal} | {verdict} | {_beside(figure)} |"


def _beside(figure: Mapping[str, Any]) -> str:
    """What else a figure says in a word or two."""
    said = {
        "ms": "{:.1f} ms",
        "of_limit": "{:.1f} x the limit",
        "bits": "{:.2f} bits",
        "bytes_left": "{:.3f} of the bytes",
        "documents": "{} documents",
        "method": "{}",
        "ours": "{}",
        "theirs": "against {}",
    }
    found = [form.format(figure[key]) for key, form in said.items() if isinstance(figure.get(key), int | float | str)]
    if "keys" in figure:
        found.append(f"{figure['keys_found']} of {figure['keys']} keys found")
    return ", ".join(found)


def _number(value: float) -> str:
    """Three digits that count; whole numbers from a thousand up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
