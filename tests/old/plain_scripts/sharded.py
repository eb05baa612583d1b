"""In the manner of torchtitan: a named mesh, fully_shard, and distributed checkpoints."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import fault, fingerprint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
for layer in model:
    fully_shard(layer, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
draws = torch.Generator().manual_seed(rank)
for step in range(6):
    fault(step, rank)
    inputs = torch.randn(4, 8, generator=draws)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    if step == 2:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(folder[0], "step-3"))
weights, moments = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(folder[0], "step-3"))
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank == 0:
    whole_model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    whole_model.load_state_dict(whole)
    print("weights", fingerprint(whole_model))
dist.destroy_process_group()
