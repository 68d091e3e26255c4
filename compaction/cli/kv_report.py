"""What `compaction kv` says: the documented JSON keys, and tables for people."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from compaction.cli.kv_sources import Source
from compaction.cli.output import console, counted, table
from compaction.errors import InvalidInput
from compaction.kv.cost import Gpu
from compaction.kv.geometry import KVGeometry, LayerGeometry
from compaction.kv.storage import Storage

__all__ = ["Weighed", "binary", "show", "weigh"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that are alike: of one kind, with one window and one width."""

    layer: LayerGeometry
    count: int

    def to_json(self, tokens: int) -> dict[str, Any]:
        """Sums over these layers."""
        layer = self.layer
        return {
            "kind": layer.kind,
            "layers": self.count,
            "keeps": layer.keeps,
            "bytes_per_token": self.count * layer.bytes_per_token,
            "state_bytes": None if layer.state_bytes is None else self.count * layer.state_bytes,
            "bytes": self.count * layer.total(tokens),
        }


@dataclass(frozen=True, slots=True)
class Weighed:
    """A model's geometry at a length; `expanded` is MLA's older form, where there is one."""

    source: Source
    storage: Storage
    tokens: int
    geometry: KVGeometry
    expanded: KVGeometry | None

    @property
    def bytes(self) -> int:
        """Of the whole conversation."""
        return self.geometry.total(self.tokens)

    @property
    def marginal(self) -> int:
        """Bytes the next token adds once all windows are full."""
        return sum(layer.bytes_per_token for layer in self.geometry.layers if layer.keeps is None)

    @property
    def kinds(self) -> list[Kind]:
        """Layers that are alike, the heaviest first."""

        def key(layer: LayerGeometry) -> tuple[int, str, int, int]:
            return -layer.bytes_per_token, layer.kind, layer.keeps or 0, layer.state_bytes or 0

        groups = [list(group) for _, group in groupby(sorted(self.geometry.layers, key=key), key)]
        made = [Kind(group[0], len(group)) for group in groups]
        return sorted(made, key=lambda kind: -kind.count * kind.layer.total(self.tokens))

    def to_json(self, gpu: Gpu | None) -> dict[str, Any]:
        """The documented keys, in their order."""
        data = self.geometry.to_json(self.tokens)
        data |= {
            "model": self.source.name,
            "source": self.source.origin,
            "dtype": self.storage.name,
            "marginal_bytes_per_token": self.marginal,
            "state_bytes": self.geometry.state_bytes,
            "unknown_states": self.geometry.unknown_states,
            "kinds": [kind.to_json(self.tokens) for kind in self.kinds],
        }
        if self.expanded is not None:
            expanded = self.expanded
            data["expanded"] = {"bytes_per_token": expanded.bytes_per_token, "bytes": expanded.total(self.tokens)}
        if gpu is not None:
            data["cost"] = gpu.to_json(self.bytes)
        return data


def weigh(source: Source, storage: Storage, tokens: int) -> Weighed:
    """Raises InvalidInput with the model and the key that is missing or makes no sense."""

    def read(latent: bool) -> KVGeometry:
        return KVGeometry.from_config(source.config, storage.keys, value_bytes=storage.values, latent=latent)

    try:
        geometry = read(latent=True)
    except InvalidInput as exc:
        raise InvalidInput(f"{source.origin}: {exc}") from exc
    try:
        expanded = read(latent=False) if geometry.family.startswith("MLA") else None
    except InvalidInput:  # a config may lack the keys that only the expanded form needs
        expanded = None
    return Weighed(source, storage, tokens, geometry, expanded)


def binary(size: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.4g} {unit}"
        size /= 1024
    return f"{size:,.4g} TiB"


def show(weighed: list[Weighed], tokens: int, gpu: Gpu | None) -> None:
    """One model by kind of layer; several side by side."""
    if len(weighed) == 1:
        _one(weighed[0])
    else:
        _several(weighed, tokens)
    if gpu is not None:
        _cost(weighed, gpu)
    for line in dict.fromkeys(note for item in weighed for note in _notes(item)):
        console().print(line)


def _one(item: Weighed) -> None:
    columns = ("layers", "kind", "keeps", "per token", "fixed state", f"at {counted(item.tokens, 'token')}")
    rows: list[tuple[object, ...]] = []
    for kind in item.kinds:
        data = kind.to_json(item.tokens)
        keeps = "all" if kind.layer.bytes_per_token else "–"
        keeps = f"last {kind.layer.keeps:,}" if kind.layer.keeps else keeps
        fixed = "unknown" if data["state_bytes"] is None else binary(data["state_bytes"])
        size = _at_least(data["bytes"], data["state_bytes"] is None)
        rows.append((kind.count, kind.layer.kind, keeps, binary(data["bytes_per_token"]), fixed, size))
    per_token, unknown = item.geometry.bytes_per_token, item.geometry.unknown_states > 0
    state, size = _at_least(item.geometry.state_bytes, unknown), _at_least(item.bytes, unknown)
    rows.append((len(item.geometry.layers), "all", "", binary(per_token), state, size))
    title = f"{item.source.name} · {item.geometry.family} · {item.storage.name}"
    console().print(table(title, columns, rows, right=("layers", *columns[3:])))
    console().print(f"{per_token:,} bytes per token, {item.bytes:,} bytes at {counted(item.tokens, 'token')}")


def _at_least(size: int, unknown: bool) -> str:
    """A sum that a state of unknown size would add to says so."""
    return f"> {binary(size)}" if unknown else binary(size)


def _several(weighed: list[Weighed], tokens: int) -> None:
    columns = (
        "model",
        "family",
        "layers",
        "per token",
        "windows full",
        "fixed state",
        f"at {counted(tokens, 'token')}",
    )
    rows = [
        (
            item.source.name,
            item.geometry.family,
            " + ".join(f"{kind.count} {kind.layer.kind}" for kind in item.kinds),
            binary(item.geometry.bytes_per_token),
            binary(item.marginal),
            _at_least(item.geometry.state_bytes, item.geometry.unknown_states > 0),
            _at_least(item.bytes, item.geometry.unknown_states > 0),
        )
        for item in weighed
    ]
    console().print(table(f"KV cache · {weighed[0].storage.name}", columns, rows, right=columns[3:]))


def _cost(weighed: list[Weighed], gpu: Gpu) -> None:
    columns = ("model", "conversations that fit", "USD per conversation and hour")
    rows = []
    for item in weighed:
        cost = gpu.to_json(item.bytes)
        rows.append((item.source.name, cost["conversations"], f"{cost['usd_per_hour']:.6f}"))
    free = f"{binary(gpu.memory)} less {binary(gpu.weights)} of weights"
    console().print(table(f"{free}, ${gpu.usd_per_hour:,.2f} an hour", columns, rows, right=columns[1:]))


def _notes(item: Weighed) -> list[str]:
    notes = []
    if item.expanded is not None:
        expanded = item.expanded
        notes.append(
            f"{item.source.name}: transformers <= 5.14 keeps MLA expanded to every head: "
            f"{binary(expanded.bytes_per_token)} per token, {binary(expanded.total(item.tokens))}"
        )
    if item.geometry.unknown_states:
        number = counted(item.geometry.unknown_states, "layer")
        notes.append(f"{item.source.name}: {number} with a state of unknown size, not counted")
    if item.storage.quantized:
        notes.append(f"{item.storage.name}: elements alone; scales and full-precision windows come on top")
    return notes
