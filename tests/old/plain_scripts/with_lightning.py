"""A script of Lightning."""

import lightning
import torch
from beside import fault, fingerprint, samples_of


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def training_step(self, batch, index):
        fault(index, self.global_rank)
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader(samples_of(80), batch_size=4, shuffle=True))
if trainer.is_global_zero:
    print(type(trainer.strategy.cluster_environment).__name__)
    print("weights", fingerprint(model))
