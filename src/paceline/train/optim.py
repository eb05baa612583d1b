"""Optimizers by name."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.spec import OptimSpec


def build_optimizer(optim: OptimSpec, model: nn.Module) -> Optimizer:
    """The optimizer of a job over all trainable parameters of `model`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optim.name == "sgd":
        return SGD(
            parameters,
            lr=optim.lr,
            momentum=optim.momentum,
            nesterov=optim.nesterov,
            weight_decay=optim.weight_decay,
        )
    kind = Adam if optim.name == "adam" else AdamW
    return kind(parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
