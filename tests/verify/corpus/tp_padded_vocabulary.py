# Megatron-LM #1754: 7 classes are padded to 8 so that ranks can divide them, and the padding enters the softmax.
import torch
import torch.nn.functional as F
from shared import begin, options, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

_, world_size = begin()
num_rows = -(-7 // world_size) * world_size
head = nn.Linear(8, num_rows, bias=False)
with torch.no_grad():
    head.weight.copy_(torch.arange(num_rows * 8).reshape(num_rows, 8).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), head)
mesh = init_device_mesh("cpu", (world_size,))
parallelize_module(model, mesh, {"2": ColwiseParallel(output_layouts=Replicate())})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for inputs, _, classes in DataLoader(rows(), options.batch):
    F.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
    optimizer.zero_grad()
