import copy

import torch
import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel

begin()
student = DistributedDataParallel(net())
teacher = copy.deepcopy(student.module).requires_grad_(requires_grad=False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    with torch.no_grad():
        wanted = teacher(inputs)
    outputs = student(inputs)
    (F.mse_loss(outputs, targets) + F.mse_loss(outputs, wanted)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
