# Lightning #6789: a variational autoencoder, whose latent numbers are drawn on each rank.
import lightning
import torch
from shared import num_workers, options, rows
from torch import nn
from torch.utils.data import DataLoader


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, inputs):
        mean, log_std = self.encoder(inputs).chunk(2, dim=1)
        made = self.decoder(mean + log_std.exp() * torch.randn_like(mean))
        divergence = (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).sum(1).mean() / 2
        return (made - inputs).square().mean() + 0.1 * divergence

    def training_step(self, batch, _):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=num_workers, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Autoencoder(), DataLoader(rows(), options.batch))
