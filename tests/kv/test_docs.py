"""docs/kv.md does not lie: its console blocks and its table are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from compaction.cli import cli
from compaction.kv.geometry import KVGeometry
from tests.kv.architectures import ARCHITECTURES, config_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "kv.md").read_text("utf-8")
BLOCKS = re.findall(r"```console\n\$ compaction (.+)\n([^`]*)```", TEXT)


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_console_blocks(command: str, output: str) -> None:
    """Each command prints what stands below it."""
    done = CliRunner().invoke(cli, command.split())

    assert [line.rstrip() for line in done.output.splitlines()] == output.splitlines()


def test_the_table_of_architectures() -> None:
    """Every architecture that is measured stands in the table, with the bytes that the geometry predicts."""
    rows = []
    for name in ARCHITECTURES:
        geometry = KVGeometry.from_config(config_of(name).get_text_config(decoder=True).to_dict(), 2)
        rows.append(f"| {name} | {geometry.family} | {geometry.total(33):,} |")

    assert [row for row in rows if row not in TEXT.splitlines()] == []
