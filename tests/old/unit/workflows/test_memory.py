"""What devices would hold: the model's own numbers, divided as each strategy divides them."""

from __future__ import annotations

import pytest

import paceline
from paceline.cli.console import table_console
from paceline.errors import JobError
from paceline.models import build
from paceline.workflows.memory import MemoryTable, StrategyMemory

NUM_BYTES = 4 * sum(parameter.numel() for parameter in build("lenet").parameters())


def test_each_strategy_divides_what_it_says() -> None:
    found = paceline.memory("digits-lenet", 4, device_bytes=10**12, settings=["optim.momentum=0.9"])
    rows = {row.strategy: row.memory for row in found.rows}
    dp, zero1, zero2, fsdp = rows["dp"], rows["zero1"], rows["zero2"], rows["fsdp"]
    assert dp is not None and zero1 is not None and zero2 is not None and fsdp is not None
    assert dp.parameter_bytes == dp.gradient_bytes == dp.optimizer_bytes == NUM_BYTES
    shard = pytest.approx(NUM_BYTES / 4, rel=0.05)  # shards are padded to equal lengths
    assert zero1.optimizer_bytes == zero2.optimizer_bytes == fsdp.optimizer_bytes == shard
    assert zero2.gradient_bytes == fsdp.gradient_bytes == fsdp.parameter_bytes == shard
    assert zero1.gradient_bytes == pytest.approx(NUM_BYTES, rel=0.05)
    assert zero1.gathered_bytes == zero2.gathered_bytes == pytest.approx(NUM_BYTES, rel=0.05)
    assert fsdp.gathered_bytes == 0
    assert all(found.fits(row) for row in found.rows)


def test_activations_follow_the_micro_batch() -> None:
    small, large = (paceline.memory("digits-lenet", 1, micro_batch_size=size, device_bytes=10**6) for size in (4, 16))
    of_small, of_large = small.rows[0].memory, large.rows[0].memory
    assert of_small is not None and of_large is not None
    assert of_large.activation_bytes == pytest.approx(4 * of_small.activation_bytes, rel=0.05)
    assert [small.fits(row) for row in small.rows] == [False]


def test_what_cannot_be_done_is_said_in_its_row() -> None:
    found = paceline.memory("digits-lenet", 50)
    problems = {row.strategy: row.problem for row in found.rows if row.memory is None}
    assert "pp" in problems and problems["pp"].endswith(".")
    with pytest.raises(JobError, match="devices = 0"):
        paceline.memory("digits-lenet", 0)


def test_brackets_in_a_sentence_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """They are no markup, in a notebook or on a terminal."""
    found = MemoryTable(4, 8, (StrategyMemory("pp", None, "The layer blocks[bold] cannot be cut."),))
    assert "blocks[bold]" in found._repr_html_()
    table_console(120).print(found.table())
    assert "blocks[bold]" in capsys.readouterr().out
