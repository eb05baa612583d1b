import torch.nn.functional as F
from shared import begin, net, options, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

begin()
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in DataLoader(rows(), options.batch, shuffle=True):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
