"""Parked caches below the engine: taken apart, written, refused, sent down tier by tier, and put together again."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from compaction.engines.forward import Forward
from compaction.errors import CacheRefused, InvalidBudget
from compaction.kv.arena import ArenaLayer
from compaction.kv.cache import ArenaCache
from compaction.kv.measure import storage_bytes
from compaction.kv.probe import probe
from compaction.kv.residency import Pool
from compaction.kv.residency.blocks import BlockStore
from compaction.kv.residency.files import file_bytes, read_parcel, write_parcel
from compaction.kv.residency.fingerprint import Identity, ids_digest, tokenizer_digest
from compaction.kv.residency.folder import Folder
from compaction.kv.residency.layers import dump_layer
from compaction.kv.residency.parcel import Parcel
from compaction.kv.residency.shelf import Shelf
from compaction.kv.residency.sizes import CacheSizes, slots_held
from compaction.kv.residency.snapshot import pack_cache, packed_slots, unpack_cache
from compaction.kv.slot_map import SlotMap
from compaction.kv.splice import Splicer
from tests.fixtures_models import tiny_model, tiny_tokenizer
from tests.kv.architectures import ARCHITECTURES, config_of, model_of

TOKENIZER = tokenizer_digest(tiny_tokenizer())
CPU = torch.device("cpu")
MINE = {"model": "m", "conversation": "c", "ids": "1"}
ROOT = Path(__file__).resolve().parents[2]
# One of each kind of layer; `ARCHITECTURES` has more of the same kinds.
KINDS = (
    "llama",
    "mistral, sliding",
    "gemma3n, shared",
    "deepseek v3, MLA",
    "deepseek v3.2, MLA indexed",
    "lfm2, convolution",
    "mamba",
    "falcon h1, both in a layer",
    "zamba2",
    "qwen3-next, linear",
    "kimi linear, MLA",
)


def parcel(mark: int = 1, elements: int = 100) -> Parcel:
    """Tensors of several widths, 8 bytes an element in all."""
    generator = torch.Generator().manual_seed(mark)
    wide = torch.randn(2, elements // 2, generator=generator)
    return Parcel(
        {
            "0.keys": wide,
            "0.codes": torch.randint(0, 255, (elements,), dtype=torch.uint8, generator=generator),
            "1.values": wide[0].to(torch.bfloat16),
            "1.more": wide[1].to(torch.bfloat16),
            "2.flags": wide[0, : elements // 2] > 0,
            "2.rest": torch.zeros(elements // 2, dtype=torch.int8),
            "3.scalar": torch.tensor(7),
            "3.empty": torch.empty(0, 4),
        },
        {"layers": [mark], "note": "ä"},
    )


def same(a: Parcel, b: Parcel) -> bool:
    """Whether two parcels are equal bit by bit."""
    return (
        dict(a.meta) == dict(b.meta)
        and set(a.tensors) == set(b.tensors)
        and all(
            a.tensors[n].dtype == b.tensors[n].dtype
            and a.tensors[n].shape == b.tensors[n].shape
            and torch.equal(a.tensors[n], b.tensors[n])
            for n in a.tensors
        )
    )


def ids(count: int) -> list[int]:
    """Some token ids below 60."""
    return [(7 * index * index + 3 * index) % 57 + 3 for index in range(count)]


# -- caches


@pytest.mark.parametrize("name", KINDS)
def test_a_cache_comes_back_bit_by_bit_whatever_its_layers(name: str) -> None:
    """Packed and unpacked, every kind of layer goes on with the same logits, and its tokens and positions stand."""
    model = model_of(name, "bfloat16")
    forward = Forward(model)
    before, after = forward.new_cache(64), forward.new_cache(64)
    forward(before, ids(27), 0)
    slot_map = SlotMap()
    slot_map.append(ids(27))

    packed = pack_cache(before.layers, slot_map, {"dirty_from": 3})
    restored = unpack_cache(packed, after.layers, CPU)

    assert (restored.slot_map, restored.extra) == (slot_map, {"dirty_from": 3})
    assert packed.nbytes == storage_bytes(list(packed.tensors.values()))
    for token, at in ((5, 27), (9, 28)):
        assert torch.equal(forward(before, [token], at), forward(after, [token], at))


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_known_before_they_are_allocated(name: str) -> None:
    """What two tokens tell of a model's layers is what forty weigh, to the byte; copies while growing come on top."""
    forward = Forward(model_of(name, "bfloat16"))
    sizes = CacheSizes.learn(lambda: forward.new_cache(64), forward)
    cache = forward.new_cache(64)
    cache.reserve(40)
    nothing = slots_held(cache.layers, 0)
    forward(cache, ids(39), 0)
    forward(cache, [5], 39)

    most = sum(layer.most(0, 40, 0) for layer in sizes.layers)
    assert most == storage_bytes(cache) <= sizes.peak(nothing, 40, 0)


@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "gemma3, hybrid", "deepseek v3.2, MLA indexed"])
@pytest.mark.parametrize("reply", [2, 20])
def test_growth_stays_within_what_was_foretold(name: str, reply: int) -> None:
    """From any size to any other, a sliding layer's recorded past included, no moment needs more."""
    model = model_of(name, "float32")
    forward = Forward(model)
    sizes = CacheSizes.learn(lambda: forward.new_cache(128), forward)
    cache = forward.new_cache(128)
    length = 0
    for prompt in (8, 30, 31, 90, 20):
        if prompt < length:
            cache, length = forward.new_cache(128), 0
        foretold = sizes.peak(slots_held(cache.layers, length), prompt + reply, reply)
        cache.shrink(prompt + reply)
        cache.meter.peak = cache.meter.held
        cache.reserve(prompt + reply)
        forward(cache, ids(prompt - length), length)
        for layer in cache.arenas:
            layer.record_past = True
        for at in range(reply):
            forward(cache, [5], prompt + at)
        for layer in cache.arenas:
            layer.record_past = False
        others = storage_bytes([layer for layer in cache.layers if not isinstance(layer, ArenaLayer)])
        assert cache.meter.peak + others <= foretold
        length = prompt + reply


def test_a_layer_of_an_unknown_kind_is_refused_by_name() -> None:
    """Somebody's layer may keep its state anywhere: it is not parked in parts."""

    class ClusteredLayer:
        keys = None

    with pytest.raises(CacheRefused, match="layer 4 is a ClusteredLayer"):
        dump_layer(4, ClusteredLayer())


def test_an_attribute_that_is_not_understood_is_refused_by_name() -> None:
    """A known kind that holds more than tensors and figures is refused too."""
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()
    setattr(layer, "helper", object())  # noqa: B010

    with pytest.raises(CacheRefused, match=r"2\.helper is a object"):
        dump_layer(2, layer)


def test_other_layers_do_not_take_it() -> None:
    """A cache of another model is refused even without a fingerprint."""
    llama, sliding = (Forward(model_of(name, "float32")) for name in ("llama", "gemma3, hybrid"))
    cache = llama.new_cache(32)
    llama(cache, ids(5), 0)

    with pytest.raises(CacheRefused, match="layer 0 is a ArenaSlidingLayer and a ArenaLayer was parked"):
        unpack_cache(pack_cache(cache.layers, SlotMap()), sliding.new_cache(32).layers, CPU)
    with pytest.raises(CacheRefused, match="4 layers were parked and the model has 1"):
        unpack_cache(pack_cache(cache.layers, SlotMap()), sliding.new_cache(32).layers[:1], CPU)


def test_slots_are_known_before_it_comes_back() -> None:
    """A sliding layer holds fewer than the conversation has tokens."""
    forward = Forward(model_of("gemma3, hybrid", "float32"))
    cache = forward.new_cache(64)
    forward(cache, ids(27), 0)
    slot_map = SlotMap()
    slot_map.append(ids(27))

    assert sorted(set(packed_slots(pack_cache(cache.layers, slot_map)))) == [11, 27]


# -- files


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    """Bit by bit, of the length that was foretold, and readable by its owner only."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)

    assert same(read_parcel(path, MINE), parcel())
    assert path.stat().st_size == file_bytes(parcel(), MINE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_is_safetensors(tmp_path: Path) -> None:
    """The format's own reader opens it and finds the same tensors."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert same(Parcel(tensors, json.loads(metadata["meta"])), parcel())
    assert json.loads(metadata["fingerprint"]) == MINE


def test_a_stranger_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    """Another conversation, other ids: each is named."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)

    with pytest.raises(CacheRefused, match="is of another conversation, ids") as caught:
        read_parcel(path, {**MINE, "ids": "2", "conversation": "d"})
    assert caught.value.code == "fingerprint"


@pytest.mark.parametrize("where", ["first byte", "header", "metadata", "data", "last byte"])
def test_a_changed_byte_is_refused(tmp_path: Path, where: str) -> None:
    """Wherever it stands."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)
    raw = bytearray(path.read_bytes())
    at = {
        "first byte": 0,
        "header": raw.index(b"data_offsets") + 16,
        "metadata": raw.index(b"layers") + 12,
        "data": len(raw) - 300,
        "last byte": len(raw) - 1,
    }[where]
    raw[at] ^= 1
    path.write_bytes(raw)

    with pytest.raises(CacheRefused) as caught:
        read_parcel(path, MINE)
    assert caught.value.code == "corrupted"


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1, -200])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    """However much is missing."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(CacheRefused) as caught:
        read_parcel(path, MINE)
    assert caught.value.code == "corrupted"


@pytest.mark.parametrize(
    "header", [b"[" * 200_000, b'{"__metadata__": {"kind": "kv-compaction/1"}, "a": {}}', b"[]", b"\xff{}"]
)
def test_a_file_of_another_make_is_refused(tmp_path: Path, header: bytes) -> None:
    """Whatever its header holds."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(CacheRefused, match="truncated or no cache file") as caught:
        read_parcel(path, MINE)
    assert caught.value.code == "corrupted"


def test_extents_beyond_numbers_are_refused(tmp_path: Path) -> None:
    """JSON has numbers that no integer is."""
    path = tmp_path / "a.safetensors"
    place = '{"dtype": "U8", "shape": [1e999], "data_offsets": [0, 1e999]}'
    header = f'{{"__metadata__": {{"kind": "kv-compaction/1"}}, "a": {place}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(CacheRefused, match="truncated or no cache file"):
        read_parcel(path, MINE)


def test_a_longer_file_and_none_are_refused(tmp_path: Path) -> None:
    """Bytes behind the end are as wrong as missing ones."""
    path = tmp_path / "a.safetensors"
    with pytest.raises(CacheRefused, match="No such file"):
        read_parcel(path, MINE)
    write_parcel(path, parcel(), MINE)
    with path.open("ab") as file:
        file.write(b"\0")

    with pytest.raises(CacheRefused, match="truncated or no cache file"):
        read_parcel(path, MINE)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """Neither a file nor half of one, and what stood there before stays."""
    path = tmp_path / "a.safetensors"
    write_parcel(path, parcel(), MINE)
    unknown = Parcel({"0.keys": torch.zeros(3, dtype=torch.complex64)}, {})

    with pytest.raises(CacheRefused, match="complex64"):
        write_parcel(path, unknown, MINE)
    assert same(read_parcel(path, MINE), parcel())
    assert [item.name for item in tmp_path.iterdir()] == ["a.safetensors"]


# -- folders


def test_a_folder_is_its_owners_and_goes_with_it(tmp_path: Path) -> None:
    """0700, and nothing is left behind."""
    folder = Folder(tmp_path / "deep" / "parent")
    mode = stat.S_IMODE(folder.path.stat().st_mode)
    (folder.path / "00000001.safetensors").write_bytes(b"x")
    folder.close()
    folder.close()

    assert (mode, list((tmp_path / "deep" / "parent").iterdir())) == (0o700, [])


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    """The next one to open the folder sweeps it; strangers' files stay."""
    code = (
        "import os, sys, pathlib\n"
        "from compaction.kv.residency.folder import Folder\n"
        "folder = Folder(pathlib.Path(sys.argv[1]))\n"
        "(folder.path / '00000001.safetensors').write_bytes(b'x' * 100)\n"
        "(folder.path / '00000002.part').write_bytes(b'x' * 100)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    left = sorted(path.suffix for path in tmp_path.rglob("*"))
    (tmp_path / "notes.txt").write_text("mine")
    living = Folder(tmp_path)
    (living.path / "00000001.safetensors").write_bytes(b"x")
    another = Folder(tmp_path)

    assert (done.returncode, left) == (-9, ["", ".lock", ".part", ".safetensors"])
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert found == {"notes.txt", *(f"{f.path.name}{end}" for f in (living, another) for end in ("", ".lock"))}
    assert (living.path / "00000001.safetensors").exists()
    living.close()
    another.close()


def test_a_forked_child_leaves_its_parents_files(tmp_path: Path) -> None:
    """Its copy of the folder is not its own."""
    code = (
        "import os, sys, pathlib\n"
        "from compaction.kv.residency.folder import Folder\n"
        "folder = Folder(pathlib.Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"
        "    sys.exit()\n"
        "os.wait()\n"
        "print(folder.path.is_dir())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)

    assert (done.stdout, list(tmp_path.iterdir())) == (b"True\n", [])


def test_a_folder_that_cannot_be_had_is_one_clear_line(tmp_path: Path) -> None:
    """A file in its place, say."""
    (tmp_path / "file").write_text("")

    with pytest.raises(InvalidBudget, match="cannot park caches in"):
        Folder(tmp_path / "file")


# -- pools


def test_a_pool_is_checked_when_it_is_made() -> None:
    """Sizes are read once; what cannot be is an InvalidBudget that says so."""
    pool = Pool(device="2GiB", host="8GiB", disk=("~/caches", "50GiB"))

    assert (pool.device_bytes, pool.host_bytes, pool.disk_bytes) == (2 << 30, 8 << 30, 50 << 30)
    assert pool.folder == Path.home() / "caches"
    assert Pool.of("1KiB") == Pool(1024) and Pool.of(pool) is pool and Pool(1).folder is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0,), "0 bytes"),
        (("-1",), "cannot read"),
        ((True,), "not True"),
        ((1, -5), "-5 bytes"),
        ((1, None), "not None"),
        ((1, 0, "/tmp"), "a folder and its bytes"),
        ((1, 0, ("/tmp", 0)), "0 bytes"),
        ((1, 0, ("", 5)), "needs a folder, not ''"),
        ((1, 0, ("/tmp/a\0b", 5)), "needs a folder, not"),
        ((1, 0, ("~nobody of that name/kv", 5)), "needs a folder, not"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments: Any, says: str) -> None:
    """One clear line each."""
    with pytest.raises(InvalidBudget, match=says):
        Pool(*arguments)


# -- shelves

SIZE = storage_bytes(list(parcel().tensors.values()))
FILE = file_bytes(parcel(), {**MINE, "ids": "0"})


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """Room for two parcels in memory and for three in files."""
    made = Shelf(Pool(1, host=2 * SIZE, disk=(tmp_path, 3 * FILE)))
    yield made
    made.close()


def fill(shelf: Shelf, count: int) -> None:
    """Parcels 0, 1, …, each with its own mark."""
    for mark in range(count):
        shelf.put(str(mark), parcel(mark), {**MINE, "ids": str(mark)})


def tiers(shelf: Shelf, count: int) -> list[str | None]:
    """Where each of them is."""
    return [shelf.tier(str(mark)) for mark in range(count)]


def test_the_least_recently_used_goes_down(shelf: Shelf) -> None:
    """From memory to files, from files to nowhere; budgets are kept to the byte."""
    fill(shelf, 7)
    host, disk = shelf.usage()

    assert tiers(shelf, 7) == [None, None, "disk", "disk", "disk", "host", "host"]
    assert (host.bytes, host.conversations, disk.bytes, disk.conversations) == (2 * SIZE, 2, 3 * FILE, 3)
    assert shelf.dropped == 2
    for mark in range(2, 7):
        assert same(shelf.get(str(mark), {**MINE, "ids": str(mark)}), parcel(mark))


def test_files_are_as_long_as_the_tier_says_at_every_moment(shelf: Shelf, tmp_path: Path) -> None:
    """Also while the next one is written."""
    most = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal most
        if watching and event in {"open", "os.rename"}:
            most = max(most, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

    watching = True
    sys.addaudithook(look)
    try:
        fill(shelf, 9)
    finally:
        watching = False

    assert 2 * FILE < most <= 3 * FILE
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) == shelf.usage()[1].bytes


def test_what_is_kept_stays(shelf: Shelf) -> None:
    """A pinned parcel goes neither down nor away."""
    shelf.keep |= {"0", "1"}
    fill(shelf, 6)

    assert tiers(shelf, 6) == ["host", "host", None, "disk", "disk", "disk"]


def test_what_fits_nowhere_is_dropped_and_moves_nobody(shelf: Shelf) -> None:
    """A parcel beyond both budgets costs nobody a place."""
    fill(shelf, 2)

    assert shelf.put("huge", parcel(1, 2000), MINE) is None
    assert tiers(shelf, 2) == ["host", "host"] and not shelf.takes(20 * SIZE) and shelf.takes(SIZE)


def test_a_wrong_fingerprint_is_refused_from_memory_and_file(shelf: Shelf) -> None:
    """And what was refused is gone: it would be wrong the next time too."""
    fill(shelf, 3)
    for key in ("0", "2"):
        with pytest.raises(CacheRefused, match="ids"):
            shelf.get(key, {**MINE, "ids": "other"})

    assert tiers(shelf, 3) == [None, "host", None] and shelf.refused == {"fingerprint": 2}


def test_a_file_that_was_tampered_with_is_gone(shelf: Shelf, tmp_path: Path) -> None:
    """Counted as corrupted, and its bytes are free again."""
    fill(shelf, 3)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CacheRefused):
        shelf.get("0", {**MINE, "ids": "0"})
    assert shelf.refused == {"corrupted": 1} and not list(tmp_path.rglob("*.safetensors"))


def test_what_took_a_files_place_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    """A folder of its name: the parcel is missing, and that it could not be removed is counted, not raised."""
    fill(shelf, 3)
    (path,) = tmp_path.rglob("*.safetensors")
    path.unlink()
    path.mkdir()

    with pytest.raises(CacheRefused) as caught:
        shelf.get("0", {**MINE, "ids": "0"})
    shelf.close()
    assert caught.value.code == "missing" and path.is_dir()
    assert shelf.refused == {"missing": 1, "disk": 1} and shelf.tier("0") is None


def test_a_disk_that_refuses_costs_only_the_parcel(shelf: Shelf, tmp_path: Path) -> None:
    """Parking goes on; what could not be written is prefilled again one day."""
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folder.rename(tmp_path / "elsewhere")
    fill(shelf, 3)

    assert tiers(shelf, 3) == [None, "host", "host"]
    assert (shelf.refused, shelf.dropped) == ({"disk": 1}, 1)
    (tmp_path / "elsewhere").rename(folder)


def test_discarding_removes_the_file(shelf: Shelf, tmp_path: Path) -> None:
    """At once."""
    fill(shelf, 3)
    before = len(list(tmp_path.rglob("*.safetensors")))
    shelf.discard("0")
    shelf.discard("0")

    assert (before, len(list(tmp_path.rglob("*.safetensors"))), "0" in shelf) == (1, 0, False)


# -- fingerprints


@pytest.fixture(scope="module")
def identity() -> Identity:
    """Of a tiny Llama."""
    return Identity.of(tiny_model("llama"), TOKENIZER, name="tiny")


def test_the_same_model_has_the_same_fingerprint(identity: Identity) -> None:
    """Looked at again, and also after it has computed something."""
    Forward(tiny_model("llama"))(Forward(tiny_model("llama")).new_cache(8), [5, 6], 0)

    assert Identity.of(tiny_model("llama"), TOKENIZER, name="tiny") == identity
    assert identity.fingerprint("c", ids_digest([1, 2])) == identity.fingerprint("c", ids_digest([1, 2]))


def test_trained_weights_are_another_model(identity: Identity) -> None:
    """A step of training moves nearly every element, so that a few of each weight tell."""
    model = tiny_model("llama")
    weight = model.model.layers[2].mlp.down_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.add_(1e-3)
        changed = Identity.of(model, TOKENIZER, name="tiny")
    finally:
        with torch.no_grad():
            weight.copy_(before)

    assert changed == replace(identity, weights=changed.weights) != identity


def test_an_adapter_that_is_switched_on_is_another_model(identity: Identity) -> None:
    """PEFT keeps its weights where they are and says which are active."""
    model = tiny_model("llama")
    layer = model.model.layers[0].mlp
    layer.active_adapters, layer.disable_adapters = ["french"], False
    try:
        on = Identity.of(model, TOKENIZER, name="tiny")
        layer.disable_adapters = True
        off = Identity.of(model, TOKENIZER, name="tiny")
    finally:
        del layer.active_adapters, layer.disable_adapters

    assert len({identity.weights, on.weights, off.weights}) == 3


def test_each_part_makes_another_fingerprint(identity: Identity) -> None:
    """Model, number format, storage, tokenizer, conversation and ids."""
    one = ids_digest([1, 2])
    made = [
        identity.fingerprint("c", one),
        identity.fingerprint("d", one),
        identity.fingerprint("c", ids_digest([2, 1])),
        replace(identity, storage="k8v4").fingerprint("c", one),
        replace(identity, dtype="float16").fingerprint("c", one),
        replace(identity, tokenizer="other").fingerprint("c", one),
        Identity.of(tiny_model("qwen3"), TOKENIZER, name="tiny").fingerprint("c", one),
    ]

    assert len({json.dumps(item, sort_keys=True) for item in made}) == len(made)
    assert "c" not in made[0].values()


# -- blocks


@pytest.mark.parametrize("name", ["llama", "deepseek v3, MLA", "gemma3, hybrid"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_eviction_is_undone_bit_by_bit(name: str, tier: str, tmp_path: Path) -> None:
    """Parked and restored in gap mode, the cache is as if nothing had been evicted, and so are the next logits."""
    model = model_of(name, "bfloat16")
    forward = Forward(model)
    cache, untouched = forward.new_cache(64), forward.new_cache(64)
    slot_map = SlotMap()
    slot_map.append(ids(30))
    for each in (cache, untouched):
        forward(each, ids(30), 0)
    splicer = Splicer(cache, probe(model), slot_map)
    pool = Pool(1, host="1MiB") if tier == "host" else Pool(1, disk=(tmp_path, "1MiB"))
    store = BlockStore(pool, Identity.of(model, TOKENIZER, name=name))

    blocks = [*splicer.evict([(4, 9), (11, 15)], park=True).parked]
    for key, block in enumerate(blocks):
        assert store.put("c", f"span-{key}", block) == tier
    for key in (1, 0):
        splicer.restore(store.get("c", f"span-{key}"))

    assert splicer.slot_map.position == list(range(30)) and splicer.slot_map.ids == ids(30)
    assert torch.equal(forward(cache, [5], 30), forward(untouched, [5], 30))
    store.close()


def test_a_block_of_another_conversation_is_not_found(tmp_path: Path, identity: Identity) -> None:
    """Keys belong to a conversation; a store forgets a conversation with all its files."""
    forward = Forward(tiny_model("llama"))
    cache = forward.new_cache(64)
    forward(cache, ids(30), 0)
    slot_map = SlotMap()
    slot_map.append(ids(30))
    (block,) = Splicer(cache, probe(tiny_model("llama")), slot_map).evict([(2, 20)], park=True).parked
    store = BlockStore(Pool(1, disk=(tmp_path, "1MiB")), identity)
    store.put("c", "a", block)
    store.put("c", "b", block)
    store.put("c:a", "", block)

    with pytest.raises(CacheRefused, match="nothing is parked"):
        store.get("d", "a")
    store.discard("c", "a")
    store.discard("c")
    assert [store.tier("c", "a"), store.tier("c", "b"), store.tier("c:a", "")] == [None, None, "disk"]
    store.identity = replace(identity, weights="other")
    with pytest.raises(CacheRefused, match="another weights"):
        store.get("c:a", "")
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_every_architecture_has_its_kinds_of_layers_among_those_tested() -> None:
    """A new kind of layer shows here first."""

    def kinds(name: str) -> set[str]:
        return {type(layer).__name__ for layer in ArenaCache(config_of(name)).layers}

    tested = {kind for name in KINDS for kind in kinds(name)}
    assert {kind for name in ARCHITECTURES for kind in kinds(name)} == tested
