"""A step: a model made ready, one batch, its gradients, the checks, the update."""
