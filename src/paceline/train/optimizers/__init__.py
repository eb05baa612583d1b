"""Optimizers, several of them as one, and learning rates."""
