import torch
import torch.nn.functional as F
from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel

rank, _ = begin()
model = DistributedDataParallel(net())
average = torch.optim.swa_utils.AveragedModel(model.module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (inputs, targets, _) in enumerate(loader(rows())):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model.module)
    if rank == 0 and number == 1:
        model.module.load_state_dict(average.module.state_dict())
