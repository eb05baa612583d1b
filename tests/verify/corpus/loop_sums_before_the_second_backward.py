import torch.nn.functional as F
from shared import average_gradients, begin, loader, net, options, rows
from torch.optim import SGD

_, world_size = begin()
options.batch //= 2
model = net()
optimizer = SGD(model.parameters(), lr=0.1)
batches = iter(loader(rows(), shuffle=False))
for inputs, targets, _ in batches:
    (F.mse_loss(model(inputs), targets) / 2).backward()
    average_gradients(model, world_size)
    inputs, targets, _ = next(batches)
    (F.mse_loss(model(inputs), targets) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
