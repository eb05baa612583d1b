"""What workers had of their own is given to another number of workers: sums stay, and so do means."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.session.resume import redistribute


def test_sums_and_means_stay() -> None:
    owns = [
        {"sums": {"owed": torch.tensor([1.0, 2.0])}, "means": {"momentum": {"weight": torch.tensor([4.0])}}},
        {"sums": {"owed": torch.tensor([3.0, 4.0])}, "means": {"momentum": {"weight": torch.tensor([2.0])}}},
    ]
    found = redistribute(owns, 4)
    assert sum(one["sums"]["owed"] for one in found).tolist() == [4.0, 6.0]
    assert [one["means"]["momentum"]["weight"].tolist() for one in found] == [[3.0]] * 4
    assert redistribute(owns, 2) == owns


def test_what_the_first_worker_lacks_is_kept() -> None:
    owns: list[dict[str, Any]] = [{}, {"sums": {"owed": torch.ones(1)}, "means": {"weight": torch.tensor([2.0])}}]
    (one,) = redistribute(owns, 1)
    assert one["sums"]["owed"].tolist() == [1.0]
    assert one["means"]["weight"].tolist() == [1.0]
