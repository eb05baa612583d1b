import torch
import torch.nn.functional as F
from shared import begin, net, options, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

_, world_size = begin()
model = parallelize_module(
    net(), init_device_mesh("cpu", (world_size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = rows()
for inputs, targets, _ in DataLoader(dataset, options.batch, sampler=DistributedSampler(dataset, shuffle=False)):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
