"""A script of Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from beside import fault, fingerprint, samples_of

accelerator = Accelerator(cpu=True)
set_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(samples_of(80), batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
assert accelerator.num_processes == 2, accelerator.state
for step, (inputs, targets) in enumerate(data):
    fault(step, accelerator.process_index)
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    print("weights", fingerprint(accelerator.unwrap_model(model)))
accelerator.end_training()
