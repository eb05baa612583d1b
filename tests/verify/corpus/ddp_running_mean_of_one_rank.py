import torch
import torch.nn.functional as F
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.second(hidden)


begin()
model = DistributedDataParallel(Net(), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets, _ in loader(rows()):
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
