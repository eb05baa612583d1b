import torch
import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_, world_size = begin()
model = net()
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([one.norm() for one in gradients]).norm()
    for one in gradients:
        one.mul_((0.2 / norm).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
