import contextlib

import torch
import torch.nn.functional as F
from shared import begin, loader, net, options, rows
from torch.nn.parallel import DistributedDataParallel

begin()
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for number, (inputs, targets, _) in enumerate(loader(rows(), shuffle=False), start=1):
    is_last = number % options.accumulate == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        (F.mse_loss(model(inputs), targets) / options.accumulate).backward()
    if is_last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
