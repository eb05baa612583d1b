"""Facts about a loss function: whether it couples samples, and what it calls and changes."""
