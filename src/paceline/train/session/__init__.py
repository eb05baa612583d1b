"""The work of a run between its steps: checkpoints and resuming, status exchange, stragglers, the end."""
