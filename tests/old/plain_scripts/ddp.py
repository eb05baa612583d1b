"""Plain DistributedDataParallel."""

import torch
import torch.distributed as dist
from beside import fault, fingerprint, samples_of
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(
    samples_of(80),
    batch_size=4,
    sampler=torch.utils.data.DistributedSampler(samples_of(80), world_size, rank, seed=1),
)
for step, (inputs, targets) in enumerate(data):
    fault(step, rank)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
if rank == 0:
    print("weights", fingerprint(model))
dist.destroy_process_group()
