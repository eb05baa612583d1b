"""The collators of transformers: what they pad and mask is the same whoever collates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.containers import tensors
from paceline.data import Loading, SampleRequest, read_samples
from paceline.errors import DataError

WORDS = [f"w{number}" for number in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of a few words, made here."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    special = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = ("pad_token", "unk_token", "mask_token", "cls_token", "sep_token")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **dict(zip(names, special, strict=True)))


class Texts:
    """Tokenized texts of many lengths, with a label."""

    def __init__(self, tokenizer: Any, *, labelled: bool) -> None:
        self._tokenizer = tokenizer
        self._labelled = labelled

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        words = WORDS[: 2 + (index * 7) % 17]
        sample = dict(self._tokenizer(" ".join(words)))
        return {**sample, "label": index % 3} if self._labelled else sample


def contents(loading: Loading, requests: list[SampleRequest]) -> list[Any]:
    read = read_samples(loading, requests, seed=3, epoch=1, device=torch.device("cpu"))
    return [content for one in read for content in one]


@pytest.mark.parametrize("name", ["padding", "masking", "causal"])
def test_shards_are_the_same_whoever_collates(tokenizer: Any, name: str) -> None:
    import transformers

    collators = {
        "padding": lambda: transformers.DataCollatorWithPadding(tokenizer),
        "masking": lambda: transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3),
        "causal": lambda: transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    }
    loading = Loading.of(Texts(tokenizer, labelled=name == "padding"), 8, collate_fn=collators[name]())
    shards = tuple(np.array(shard) for shard in ([3, 1], [7, 2, 11], [4]))
    whole = contents(loading, [SampleRequest(shards, 5, 0)])
    apart = contents(loading, [SampleRequest(shards[:2], 5, 0), SampleRequest(shards[2:], 5, 2)])
    assert len({content["input_ids"].shape[1] for content in whole}) == 3, "each shard is padded for itself"
    for one, other in zip(whole, apart, strict=True):
        assert type(one) is type(other) and list(one) == list(other)
        for mine, theirs in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(mine, theirs)
    if name == "masking":
        again = contents(loading, [SampleRequest(shards, 6, 0)])
        assert any(not torch.equal(one["labels"], other["labels"]) for one, other in zip(whole, again, strict=True))


def test_a_collator_with_a_seed_is_refused(tokenizer: Any) -> None:
    import transformers

    collator = transformers.DataCollatorForLanguageModeling(tokenizer, seed=3)
    with pytest.raises(DataError, match="DataCollatorForLanguageModeling has a seed, so its draws depend on how many"):
        Loading.of(Texts(tokenizer, labelled=False), 8, collate_fn=collator)
