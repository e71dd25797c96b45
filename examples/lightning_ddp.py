"""The training of `distributed.py` as a LightningModule, on CPU processes that Lightning starts.

    python examples/lightning_ddp.py --devices 2

With encoder and loss as attributes, `strategy="ddp"` synchronises both; PGCLLoss finds the other
processes by itself.
"""

import argparse

import lightning  # pip install -e '.[lightning]'
import torch
from distributed import BATCH, DIM, SyntheticClusters, new_encoder, parse_args, purity, report
from torch import Tensor
from torch.utils.data import DataLoader

from pgcl_losses import PGCLLoss


class PGCL(lightning.LightningModule):
    def __init__(self, data: SyntheticClusters) -> None:
        super().__init__()
        self.data = data
        self.encoder = new_encoder()
        self.pgcl = PGCLLoss(DIM)

    def train_dataloader(self) -> DataLoader:
        return self.data.batches(self.current_epoch, self.global_rank, self.trainer.world_size)

    def training_step(self, views: list[Tensor]) -> Tensor:
        view1, view2 = views
        loss = self.pgcl(self.encoder(view1), self.encoder(view2))
        # Every process returns the loss of the whole batch. Lightning warns without sync_dist.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"].item()
        reached = purity(self.encoder, self.pgcl, self.data)
        self.print(report(self.current_epoch, loss, reached))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="PGCL under Lightning's DDP.")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    args = parse_args(parser)
    if args.devices < 1 or BATCH % args.devices:
        parser.error(f"--devices must divide {BATCH}, but it is {args.devices}")
    data = SyntheticClusters(args.steps * BATCH)
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=args.devices,
        max_epochs=args.epochs,
        # `batches` deals out portions already, of views that are new in every epoch.
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(PGCL(data))


if __name__ == "__main__":
    main()
