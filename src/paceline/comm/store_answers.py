"""One answer of every worker, exchanged through a store: for what is asked before there is a process group."""

from __future__ import annotations

from torch.distributed import Store  # type: ignore[attr-defined]


def exchange_answers(store: Store, question: str, answer: str, *, rank: int, world_size: int) -> list[str]:
    """A collective of all workers: the answers in the order of ranks.

    Rank 0 returns last. Its process may hold the store, and may end at once because of what was answered: the others
    would then lose the store while they still read, and report that in place of the answer.

    Args:
        question: its name in the store; asked once.
    """
    store.set(f"{question}{rank}", f"={answer}")  # a store keeps no empty values
    answers = [bytes(store.get(f"{question}{of}")).decode()[1:] for of in range(world_size)]
    if store.add(f"{question}_read", 1) == world_size:
        store.set(f"{question}_read_by_all", "yes")
    if rank == 0:
        store.wait([f"{question}_read_by_all"])
    return answers
