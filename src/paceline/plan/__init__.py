"""Plans: how to spread a job over a cluster's devices, and forecasts of its speed and memory."""
