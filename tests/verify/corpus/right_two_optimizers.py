import torch
import torch.nn.functional as F
from shared import begin, loader, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

begin()
generator = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
critic = DistributedDataParallel(
    nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1)), broadcast_buffers=False
)
of_generator, of_critic = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (generator, critic))
for inputs, *_ in loader(rows()):
    made = generator(inputs.flip(1))
    real, fake = critic(torch.cat([inputs, made.detach()])).chunk(2)
    (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
    of_critic.step()
    of_critic.zero_grad()
    F.softplus(-critic(generator(inputs.flip(1)))).mean().backward()
    of_generator.step()
    of_generator.zero_grad()
    of_critic.zero_grad()
