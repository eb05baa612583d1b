"""Rung 0: plain PyTorch on one device. Nothing of Paceline but the data."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.data import load
from paceline.models import build

train_set, test_set = load("digits")
torch.manual_seed(0)
model = build("lenet")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(5):
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch))
    for indices in order.split(64):
        samples = [train_set[int(i)] for i in indices]
        images, labels = torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

model.eval()
tests = [test_set[i] for i in range(len(test_set))]
with torch.no_grad():
    predicted = model(torch.stack([image for image, _ in tests])).argmax(1)
print(f"accuracy {float((predicted == torch.tensor([label for _, label in tests])).double().mean()):.4f}")
