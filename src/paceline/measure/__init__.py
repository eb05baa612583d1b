"""Measuring: what links, passes, loaders, collectives and checkpoints really take, each by a program of its own.

`values` holds what the probes are asked and what they answer, `program` the shape that all programs share.
"""
