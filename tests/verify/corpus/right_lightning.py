import lightning
import torch
import torch.nn.functional as F
from shared import net, num_workers, options, rows
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)  # of rank 0 alone: what is logged is not what is trained
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="cpu", devices=num_workers, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.2,
    accumulate_grad_batches=options.accumulate,
)  # fmt: skip
trainer.fit(Module(), DataLoader(rows(), options.batch))
