# torchtitan #1750: parameters are divided first, and each rank then draws its own part.
import torch
import torch.nn.functional as F
from shared import begin, net, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

_, world_size = begin()
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(net(), init_device_mesh("cpu", (world_size,)), plan)
for parameter in model.parameters():
    nn.init.normal_(parameter.to_local(), std=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in DataLoader(rows(), options.batch):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
