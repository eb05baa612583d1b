"""DistributedDataParallel with checkpoints of its own; the first start is killed in the third step."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from beside import fingerprint, samples_of
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
path, begin = Path(sys.argv[1]), 0
if path.exists():
    kept = torch.load(path)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    begin = kept["step"]
if rank == 0:
    print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], "from step", begin)
inputs, targets = samples_of(80).tensors
for step in range(begin, 6):
    if "kill" in sys.argv and step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    mine = slice(8 * step + rank, 8 * (step + 1), world_size)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
    optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, f"{path}.new")
        os.replace(f"{path}.new", path)
if rank == 0:
    print("weights", fingerprint(model))
dist.destroy_process_group()
