import torch
import torch.nn.functional as F
from shared import begin, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

_, world_size = begin()
model = nn.Sequential(nn.Linear(1, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
plan = {
    "1": SequenceParallel(),
    "2": ColwiseParallel(input_layouts=Shard(1)),
    "4": RowwiseParallel(output_layouts=Replicate()),
}
model = parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for inputs, targets, _ in DataLoader(rows(), options.batch):
    F.mse_loss(model(inputs.unsqueeze(2)).mean(1), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
