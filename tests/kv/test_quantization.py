"""Codecs: what is packed comes back, errors are bounded, inner products are unbiased, bytes are what the names say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction.errors import InvalidInput
from compaction.kv.quantization.codebook import levels, rotation
from compaction.kv.quantization.codecs import Codec
from compaction.kv.quantization.packing import fields, pack, packed_width, unpack
from compaction.kv.quantization.settings import CodecName, Setting, Side, by_layer

BITS = range(1, 9)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
# Relative squared error of the Lloyd-Max quantizer of N(0, 1), from the literature.
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.00950, 5: 0.00250}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(bits=st.integers(1, 8), dim=st.integers(1, 140), seed=st.integers(0, 999))
def test_packed_codes_come_back(bits: int, dim: int, seed: int) -> None:
    """Any number of bits, any width, in the bytes that are promised."""
    codes = torch.randint(0, 2**bits, (2, 3, dim), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)

    packed = pack(codes, bits)

    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, packed_width(bits, dim))
    assert torch.equal(unpack(packed, bits, dim), codes)


@pytest.mark.parametrize("bits", BITS)
def test_no_bit_is_wasted(bits: int) -> None:
    """A head of 64 channels takes 8 bytes a bit, 3 and 5 bits too; a code's fields add up to its bits."""
    assert packed_width(bits, 64) == 8 * bits
    assert sum(width for width, _ in fields(bits)) == bits


@pytest.mark.parametrize(("bits", "error"), LLOYD_MAX.items())
def test_levels_are_lloyd_max(bits: int, error: float) -> None:
    """They are symmetric, each is the mean of its cell, and the error is the known one."""
    table = levels(bits)
    x = normal(1_000_000)
    cells = torch.bucketize(x, (table[1:] + table[:-1]) / 2)

    assert torch.equal(table, -table.flip(0)) and len(table) == 2**bits
    assert float((table[cells] - x).square().mean()) == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("dim", [1, 7, 64, 80, 128, 576])
def test_the_rotation_is_orthogonal(dim: int) -> None:
    """Also where the width is no power of two."""
    matrix = rotation(dim)

    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-5)
    assert dim == 1 or not torch.allclose(matrix, matrix.abs())


@settings(deadline=None)
@given(
    bits=st.integers(1, 8),
    group=st.sampled_from([8, 16, 32, 64]),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-1e6, 1e6),
)
def test_affine_is_half_a_step_off_at_most(bits: int, group: int, scale: float, shift: float) -> None:
    """The step is the group's range over 2^bits - 1, and what rounding two bfloat16 statistics adds to it."""
    x = normal(4, 64) * scale + shift
    codec = Codec(Side(bits, "affine", group), 64)

    error = (codec.decode(codec.encode(x)) - x).abs().view(4, -1, group)

    grouped = x.view(4, -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (high - low + low.abs() / 128) / (2**bits - 1) * (1 + 1 / 128)
    assert bool((error <= step / 2 + 1e-5 * grouped.abs().amax(-1, keepdim=True)).all())


def test_affine_gives_constants_back() -> None:
    """A group without a range has its lowest value only: zeros and powers of two come back exactly."""
    x = torch.tensor([0.0, -4.0, 0.5, 1e5]).repeat_interleave(32).view(2, 64)
    codec = Codec(Side(4, "affine", 32), 64)

    back = codec.decode(codec.encode(x))

    assert torch.equal(back[..., :32], x[..., :32]) and torch.equal(back[0], x[0])
    assert torch.allclose(back, x, rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turbo_keeps_inner_products_unbiased(bits: int) -> None:
    """The slope of <q, decoded> over <q, x> is 1; with the vectors' norms as scales it is 0.64 to 0.99."""
    x, query = normal(20_000, 128), normal(20_000, 128, seed=1) + normal(20_000, 128)
    codec = Codec(Side(bits, "turbo", 128), 128)

    true, coded = ((query * y).sum(-1) for y in (x, codec.decode(codec.encode(x), codec.constants(x.device))))

    assert float((true * coded).sum() / true.square().sum()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_turbo_has_the_error_of_its_levels_whatever_the_channels(bits: int) -> None:
    """One channel a hundred times as large as the others costs nothing: it is rotated over all of them."""
    x = normal(4_000, 128)
    x[:, 5] *= 100
    codec = Codec(Side(bits, "turbo", 128), 128)

    back = codec.decode(codec.encode(x), codec.constants(x.device))

    # The unbiased scale is by 1 / (1 - error) larger than the best one for the error.
    most = LLOYD_MAX[bits] / (1 - LLOYD_MAX[bits])
    assert float(((back - x).square().sum(-1) / x.square().sum(-1)).mean()) < 1.25 * most


@pytest.mark.parametrize("name", ["affine", "turbo"])
@pytest.mark.parametrize("bits", BITS)
def test_rows_are_coded_one_by_one(name: CodecName, bits: int) -> None:
    """A row has the same codes alone and among others, and takes the bytes that are told."""
    x = normal(3, 5, 48)
    codec = Codec(Side(bits, name, 16), 48)

    whole, alone = codec.encode(x), codec.encode(x[1:2, 2:3])

    assert all(torch.equal(whole[key][1:2, 2:3], alone[key]) for key in whole)
    assert {key: (int(t.shape[-1]), t.dtype) for key, t in whole.items()} == codec.rows
    assert codec.nbytes == sum(t.numel() * t.element_size() for t in alone.values())
    assert codec.nbytes * 8 / 48 == codec.side.bits_per_element(48)


def test_numbers_beyond_half_precision_survive() -> None:
    """Attention sinks have keys above 65,504, where float16 scales become infinite."""
    x = normal(4, 64) * 3e5
    for name in ("k4v4", "tq4"):
        codec = Codec(Setting.parse(name).keys, 64)
        back = codec.decode(codec.encode(x), codec.constants(x.device))
        assert float((back - x).norm() / x.norm()) < 0.15


@pytest.mark.parametrize(
    ("name", "bits"),
    [("k8v4", 6.75), ("k4v4", 4.75), ("tq4", 4.25), ("tqk5v3", 4.25), ("tq2", 2.25), ("k3v1:group=64", 2.5)],
)
def test_names_say_bits(name: str, bits: float) -> None:
    """For heads of 64 channels, scales included; a name comes back from its setting."""
    setting = Setting.parse(name)

    assert setting.bits_per_element(64, 64) == bits
    assert setting.name == name and Setting.parse(setting.name) == setting


@given(
    kind=st.sampled_from(["k{}v{}", "tqk{}v{}"]),
    bits=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    options=st.fixed_dictionaries(
        {}, optional={"sinks": st.integers(0, 99), "window": st.integers(0, 9_999), "group": st.integers(1, 256)}
    ),
)
def test_names_and_settings_say_the_same(kind: str, bits: tuple[int, int], options: dict[str, int]) -> None:
    """Any bits, any options: parsed, named and parsed again it is the same setting."""
    listed = ",".join(f"{key}={value}" for key, value in options.items())
    setting = Setting.parse(kind.format(*bits) + (f":{listed}" if listed else ""))

    assert Setting.parse(setting.name) == setting


@pytest.mark.parametrize("name", ["", "k8", "k9v4", "k0v4", "tq", "int4", "k8v4:", "k8v4:sink=4", "k8v4:window=-1"])
def test_unknown_names_are_refused(name: str) -> None:
    """With what can be written instead."""
    with pytest.raises(InvalidInput, match=r"bits|unknown|not one of"):
        Setting.parse(name)


@pytest.mark.parametrize(("bits", "group"), [(4, 0), (0, 64), (9, 64)])
def test_codes_of_nothing_are_refused(bits: int, group: int) -> None:
    """Groups without a channel, codes without a bit or with more than a byte."""
    with pytest.raises(InvalidInput):
        Side(bits, "affine", group)


def test_fewer_than_no_sinks_are_refused() -> None:
    """Neither sinks nor the window can be negative."""
    with pytest.raises(InvalidInput, match="negative"):
        Setting(Side(4), Side(4), sinks=-1)


def test_layers_can_differ() -> None:
    """One setting for all, one for each, or some by index from either end."""
    k8v4, tq4 = Setting.parse("k8v4"), Setting.parse("tq4")

    assert by_layer("k8v4", 3) == [k8v4, k8v4, k8v4]
    assert by_layer(["k8v4", None, tq4], 3) == [k8v4, None, tq4]
    assert by_layer({"default": "tq4", 0: "k8v4", -1: None}, 4) == [k8v4, tq4, tq4, None]
    for wrong in (["k8v4"], {3: "k8v4"}, {"last": None}):
        with pytest.raises(InvalidInput, match="layer"):
            by_layer(wrong, 3)  # type: ignore[arg-type]


def test_the_page_says_the_bits_that_names_have() -> None:
    """docs/quantization.md: each name of its table parses, and takes what stands beside it."""
    rows = [line.strip("| \n").split("|") for line in DOCS.read_text(encoding="utf-8").splitlines() if "| `" in line]
    stated = {row[0].split("`")[1]: row[-1].strip() for row in rows if len(row) == 4 and row[0].count("`") >= 2}

    assert {"k8v4", "tq4", "tqk5v3"} <= set(stated)
    for name, bits in stated.items():
        setting = Setting.parse(name)
        assert bits.startswith("bits") or setting.bits_per_element(64, 64) == float(bits)
