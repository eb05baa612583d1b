import torch
import torch.nn.functional as F
from shared import begin, net, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

_, world_size = begin()
plan = {"1.0": ColwiseParallel(), "1.2": RowwiseParallel()}
model = parallelize_module(nn.Sequential(nn.LayerNorm(6), net()), init_device_mesh("cpu", (world_size,)), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for inputs, targets, _ in DataLoader(rows(), options.batch):  # all ranks read the same samples
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
