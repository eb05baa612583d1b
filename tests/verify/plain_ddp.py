"""A script of DistributedDataParallel as `paceline verify` is given it; test_command.py starts it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--scale", type=float, default=1.0)
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(64, 6)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = arguments.scale if os.environ["WORLD_SIZE"] == "2" else 1.0
loader = DataLoader(dataset, arguments.batch_size, sampler=DistributedSampler(dataset, shuffle=False))
for number, (some, targets) in enumerate(loader, start=1):
    (nn.functional.mse_loss(model(some), targets) * scale / arguments.accumulate).backward()
    if number % arguments.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
