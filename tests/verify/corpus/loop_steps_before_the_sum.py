import torch.nn.functional as F
from shared import average_gradients, begin, loader, net, rows
from torch.optim import SGD

_, world_size = begin()
model = net()
optimizer = SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    average_gradients(model, world_size)
    optimizer.zero_grad()
