import torch.distributed as dist
import torch.nn.functional as F
from shared import begin, loader, net, options, rows
from torch.optim import SGD

_, world_size = begin()
model = net()
optimizer = SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    # A loss that is divided by the global batch; gradients are summed, not averaged.
    (F.mse_loss(model(inputs), targets, reduction="sum") / (options.batch * world_size)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
