"""Property tests search the same examples every time and are not timed: the machines that run them are noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("paceline")
