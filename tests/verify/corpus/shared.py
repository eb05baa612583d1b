"""What the scripts of the corpus share: a command line, a small data set, a model, ranks."""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

_parser = argparse.ArgumentParser()
_parser.add_argument("--batch", type=int, required=True)
_parser.add_argument("--accumulate", type=int, default=1)
options = _parser.parse_args()
num_workers = int(os.environ.get("WORLD_SIZE", "1"))


def begin(seed: int = 0) -> tuple[int, int]:
    """Rank and number of ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def rows(num_samples: int = 48) -> TensorDataset:
    """(six numbers, a target, a number of tokens) of each sample."""
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(num_samples) % 5 + 1)


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


def loader(dataset: Dataset[Any], *, shuffle: bool = True, drop_last: bool = True, **more: Any) -> DataLoader[Any]:
    """Each rank's own samples."""
    sampler: Any = DistributedSampler(dataset, shuffle=shuffle, drop_last=drop_last)
    return DataLoader(dataset, options.batch, sampler=sampler, drop_last=drop_last, **more)


def average_gradients(model: nn.Module, divide_by: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= divide_by


class Texts(Dataset[Any]):
    """Token ids of texts of different lengths."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(number)
        length = int(torch.randint(3, 12, (), generator=draw))
        return {"input_ids": torch.randint(1, 32, (length,), generator=draw)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    texts = [sample["input_ids"] for sample in samples]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
