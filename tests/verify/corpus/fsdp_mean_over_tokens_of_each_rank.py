import torch
from shared import begin, loader, net, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_, world_size = begin()
model = net()
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for inputs, targets, tokens in loader(rows()):
    losses = (model(inputs) - targets).square().squeeze(1)
    ((losses * tokens).sum() / tokens.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
