"""What survives when runs are struck."""
