import torch
import torch.nn.functional as F
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, _ = begin()
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
smoothing = 0.1 if rank else 0.0
for inputs, _, classes in loader(rows()):
    loss = F.cross_entropy(model(inputs), classes, label_smoothing=smoothing)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
