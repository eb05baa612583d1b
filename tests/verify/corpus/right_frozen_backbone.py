import torch
import torch.nn.functional as F
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

begin()
backbone = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16)).eval()
head = DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.RMSprop(head.parameters(), lr=1e-3)
for inputs, targets, _ in loader(rows()):
    with torch.no_grad():
        features = backbone(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(head(features).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
