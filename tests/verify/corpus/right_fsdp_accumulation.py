import torch
import torch.nn.functional as F
from shared import begin, loader, net, options, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_, world_size = begin()
model = net()
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for number, (inputs, targets, _) in enumerate(loader(rows(), shuffle=False), start=1):
    is_last = number % options.accumulate == 0
    model.set_requires_gradient_sync(is_last)
    (F.mse_loss(model(inputs), targets) / options.accumulate).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
