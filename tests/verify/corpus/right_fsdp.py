import torch
import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_, world_size = begin()
model = net()
mesh = init_device_mesh("cpu", (world_size,))
for layer in model:
    if [*layer.parameters()]:
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()
    optimizer.zero_grad()
