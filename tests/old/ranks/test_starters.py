"""What `paceline new` writes trains as it stands."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.errors import JobError
from tests.old.ranks.command_line import paceline, succeeded


def test_a_starter_names_the_data_and_replaces_nothing(tmp_path: Path) -> None:
    data = tmp_path / 'a "book".txt'
    data.write_text("words", encoding="utf-8")
    written = pl.new("text", data, out=tmp_path / "mine.toml")
    assert '\\"book\\".txt"' in written.read_text(encoding="utf-8")
    with pytest.raises(JobError, match="exists already"):
        pl.new("text", data, out=written)
    with pytest.raises(JobError, match="to train on"):
        pl.new("text", tmp_path / "nothing.txt", out=tmp_path / "other.toml")
    with pytest.raises(JobError, match="choose one of images, text"):
        pl.new("txt", data)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_images(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (40, 40), (number * 20, 0, 255 if label == "cat" else 0)).save(folder / f"{number}.png")
    written = pl.new("images", tmp_path / "photos", out=tmp_path / "train.toml")
    small = ("--set", "global_batch_size=8", "--set", "model=resnet20", "--set", "data.options.image_size=32")
    succeeded(paceline("train", str(written), "-n", "2", "--max-steps", "2", *small, cwd=tmp_path, timeout_s=250))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(map(str, range(20000))), encoding="utf-8")
    written = pl.new("text", tmp_path / "book.txt", out=tmp_path / "train.toml")
    succeeded(paceline("train", str(written), "-n", "2", "--max-steps", "2", cwd=tmp_path, timeout_s=250))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensors(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(200, 6))
    np.savez(tmp_path / "arrays.npz", inputs=inputs, targets=inputs[:, :3].argmax(1))
    written = pl.new("tensors", tmp_path / "arrays.npz", out=tmp_path / "train.py")
    _same_on_two_workers(written, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["good", "bad", "fine", "film", "book", "very"]
    chosen = random.Random(0)
    with (tmp_path / "texts.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(40):
            text = chosen.choices(words, k=chosen.randint(2, 6))
            rows.writerow([" ".join(text), int("good" in text)])
    folder = tmp_path / "model"
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    transformers.BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    written = pl.new("transformers", tmp_path / "texts.csv", out=tmp_path / "train.py")
    script = written.read_text(encoding="utf-8")
    written.write_text(re.sub(r'MODEL = ".*?"', f'MODEL = "{folder}"', script), encoding="utf-8")
    _same_on_two_workers(written, tmp_path)


def _same_on_two_workers(script: Path, folder: Path) -> None:
    said = []
    for num_workers in ("1", "2"):
        here = folder / num_workers
        here.mkdir()
        launched = succeeded(
            paceline("launch", "-n", num_workers, "--threads", "1", str(script), cwd=here, timeout_s=250)
        )
        said.append([float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", launched.stdout)])
    assert len(said[0]) >= 3
    assert said[0] == pytest.approx(said[1], abs=2e-4)
