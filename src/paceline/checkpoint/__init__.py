"""Checkpoints: written while training goes on, complete or absent, checked to the last byte before they are used."""
