"""Metrics over a data set, each sample counted once."""
