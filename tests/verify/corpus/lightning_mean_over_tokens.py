import lightning
import torch
from shared import net, num_workers, options, rows
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        inputs, targets, tokens = batch
        losses = (self.net(inputs) - targets).square().squeeze(1)
        return (losses * tokens).sum() / tokens.sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="cpu", devices=num_workers, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(rows(), options.batch))
