"""From what a user names to a model's config: a file, a folder, a built-in reference, or a hub id.

Invariant: a hub is asked only for "owner/name", and only after everything local; nothing but a config is ever loaded.
"""

from __future__ import annotations

import difflib
import json
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compaction.errors import InvalidInput, ModelNotFound
from compaction.kv.geometry import knows
from compaction.kv.references import REFERENCES

__all__ = ["Source", "resolve"]

HUB = "https://huggingface.co"
HUB_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Source:
    """A config, the name it goes by, and where it came from."""

    name: str
    config: Mapping[str, Any]
    origin: str


def resolve(name: str) -> Source:
    """The config of a model. Raises ModelNotFound or InvalidInput with one line that names it and the next step."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelNotFound(f"folder {name!r} holds no model: there is no config.json in it")
    if path.is_file():
        label = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _completed(Source(label, _read(path), str(path)))
    known = REFERENCES.get(name.lower())
    if known is not None:
        return Source(name.lower(), known.config, known.source)
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"{name!r} does not exist: give a config.json, a model folder or a built-in name")
    if "/" in name:
        return _from_hub(name)
    close = difflib.get_close_matches(name.lower(), REFERENCES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"built-in names: {', '.join(REFERENCES)}"
    raise ModelNotFound(f"{name!r} is no config.json, no model folder and no built-in name; {hint}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise InvalidInput(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise InvalidInput(f"{path}: is no JSON ({exc}): give a model's config.json") from exc
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: is a JSON {type(data).__name__}, not an object: give a model's config.json")
    return data


def _completed(source: Source) -> Source:
    """The config with what its family's class fills in, where that is not known here and transformers is installed."""
    config = source.config
    if knows(config) or not isinstance(config.get("model_type"), str) or find_spec("transformers") is None:
        return source
    from transformers import CONFIG_MAPPING

    from compaction.engines.quiet import quiet

    if config["model_type"] not in CONFIG_MAPPING:
        return source
    options = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with quiet():
            made = CONFIG_MAPPING[config["model_type"]](**options).get_text_config(decoder=True)
            return Source(source.name, made.to_dict(), source.origin)
    except Exception as exc:  # each of some 500 config classes has a validation of its own
        raise InvalidInput(
            f"{source.origin}: transformers refuses this {config['model_type']!r} config: {_line(exc)}"
        ) from exc


def _from_hub(name: str) -> Source:
    """One attempt, no retries: whoever is offline learns it at once."""
    cached = _cached(name)
    if cached is not None:
        return _completed(Source(name, _read(cached), f"hub: {name}"))
    url = f"{os.environ.get('HF_ENDPOINT', HUB).rstrip('/')}/{name}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}:
            raise OSError("HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS) as response:
            data = json.load(response)
    except (OSError, ValueError) as exc:  # HTTPError and URLError are OSErrors
        raise ModelNotFound(
            f"{name!r} is no file, no folder, no built-in name, and its config.json could not be had from {url} "
            f"({_line(exc)}): give the path of its config.json"
        ) from exc
    if not isinstance(data, dict):
        raise InvalidInput(f"{url}: is no config.json")
    return _completed(Source(name, data, f"hub: {name}"))


def _cached(name: str) -> Path | None:
    """The config.json that an earlier download left in the hub's cache."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _line(exc: BaseException) -> str:
    """The last line of an error, shortened: validation errors name the field there."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return (lines[-1] if lines else type(exc).__name__)[:200].rstrip(".")
