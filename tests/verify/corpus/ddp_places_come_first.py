# A batch is the second dimension of what the model is called with.
import torch
import torch.nn.functional as F
from shared import begin, loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

_, world_size = begin()
layer = nn.TransformerEncoderLayer(16, 2, 32)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), layer, nn.Linear(16, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
texts = TensorDataset(torch.randint(0, 32, (64, 12), generator=torch.Generator().manual_seed(0)))
for (ids,) in loader(texts):
    places = ids.T
    logits = model(places[:-1])
    (F.cross_entropy(logits.flatten(0, 1), places[1:].flatten()) / world_size).backward()
    optimizer.step()
    optimizer.zero_grad()
