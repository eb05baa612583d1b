"""Measurements and progress of a run: timing, metrics, noise, environment."""
