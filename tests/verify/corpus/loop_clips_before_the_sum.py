import torch.nn.functional as F
from shared import average_gradients, begin, loader, net, rows
from torch import nn
from torch.optim import SGD

_, world_size = begin()
model = net()
optimizer = SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    average_gradients(model, world_size)
    optimizer.step()
    optimizer.zero_grad()
