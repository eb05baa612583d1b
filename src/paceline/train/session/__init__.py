"""What runs beside the steps: checkpoints and resuming, status among workers, stragglers, the end."""
