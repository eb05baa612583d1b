import torch
import torch.nn.functional as F
from shared import begin, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

rank, world_size = begin()
mesh = init_device_mesh("cpu", (world_size,))
norm = nn.LayerNorm(6)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
parallelize_module(net, mesh, {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()})
optimizer = torch.optim.SGD([*norm.parameters(), *net.parameters()], lr=0.1)
for inputs, targets, _ in DataLoader(rows(), options.batch):
    own = norm(inputs).chunk(world_size)[rank]  # sequence parallelism: each rank has a part of the places
    F.mse_loss(net(own), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
