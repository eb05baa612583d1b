from shared import begin, loader, net, rows
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

begin()
model = DistributedDataParallel(net())
optimizer = AdamW(model.parameters(), lr=1e-3)
for inputs, targets, tokens in loader(rows()):
    losses = (model(inputs) - targets).square().squeeze(1)
    loss = (losses * tokens).sum() / tokens.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
