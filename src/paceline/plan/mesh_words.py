"""The best mesh and the second best in words: step time and the reason for it."""

from __future__ import annotations

from paceline.plan.search import MeshCandidate, SearchResult
from paceline.words import duration, size


def explain(result: SearchResult) -> tuple[str, ...]:
    """Two lines about the winner and two about the runner-up: how fast, and why."""
    winner = result.winner
    lines = [f"{winner.mesh}: {duration(winner.step_s)} a step, {_batches(winner)}.", _why(result)]
    other = result.runner_up
    if other is not None:
        slower = other.step_s / winner.step_s - 1
        behind = f"{100 * abs(slower):.0f} % {'slower' if slower > 0 else 'faster, but less simple'}"
        behind = behind if abs(slower) >= 0.005 else "as fast, but less simple"
        lines += [f"Then {other.mesh}: {duration(other.step_s)} a step ({behind}), {_batches(other)}."]
        lines += [_difference(winner, other)]
    return tuple(lines)


def _batches(candidate: MeshCandidate) -> str:
    m = candidate.num_micro_batches
    again = ", activations computed again" * candidate.recompute
    return f"{m} micro-batch{'es' * (m > 1)} of {candidate.micro_batch_size}{again}"


def _why(result: SearchResult) -> str:
    held = f"It holds {size(result.winner.memory.total_bytes)} of {size(result.memory_bytes)}"
    plain = next((memory for mesh, memory in result.too_large if mesh.is_plain), None)
    if plain is not None:
        held += f", where whole replicas would need {size(plain.total_bytes)}"
    return f"{held}; {_longest_part(result.winner)}."


def _longest_part(candidate: MeshCandidate) -> str:
    parts = _parts(candidate)
    name = max(parts, key=lambda key: parts[key])
    if parts[name] < 0.01 * candidate.step_s:
        return "nothing but compute takes time"
    return f"beside compute, {name} takes most: {duration(parts[name])}"


def _parts(candidate: MeshCandidate) -> dict[str, float]:
    return {
        "waiting for gradients": candidate.exposed_s,
        "the pipeline's bubble": candidate.bubble_s,
        "sums inside of layers": candidate.tensor_s,
        "the optimizer": candidate.optimizer_s,
    }


def _difference(winner: MeshCandidate, other: MeshCandidate) -> str:
    """A sentence: the part of the step in which the runner-up is slower, and the difference in memory."""
    mine, theirs = _parts(winner) | {"compute": winner.compute_s}, _parts(other) | {"compute": other.compute_s}
    name = max(mine, key=lambda key: theirs[key] - mine[key])
    saved = winner.memory.total_bytes - other.memory.total_bytes
    memory = f"it needs {size(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    more_s = theirs[name] - mine[name]
    if more_s < 0.005 * winner.step_s:
        return f"No part of its step is longer; {memory}."
    return f"It loses by {name}, {duration(more_s)} more; {memory}."
