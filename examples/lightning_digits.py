"""Lightning: exact Gauss-Newton steps on scikit-learn's digits; the only new line is in `configure_optimizers`.

Run it: python examples/lightning_digits.py (half a minute, with Adam beside it)
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import woodbury
import woodbury.lightning


class Classifier(lightning.LightningModule):
    def __init__(self, adam: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.Tanh(), torch.nn.Linear(50, 10))
        self.criterion = torch.nn.CrossEntropyLoss()
        self.adam = adam

    def training_step(self, batch, batch_index):
        inputs, targets = batch
        loss = self.criterion(self.net(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        inputs, targets = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == targets).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        if self.adam:
            optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        else:
            optimizer = woodbury.GaussNewton(self.net, self.criterion, lr=0.3, momentum=0.9, curvature_samples=0.5)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders():
    data = load_digits()
    pictures = TensorDataset(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))
    train, test = random_split(pictures, [1400, 397], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=60, shuffle=True), DataLoader(test, batch_size=397)


def main(epochs: int = 5, adam: bool = False, **options) -> float:
    lightning.seed_everything(0, verbose=False)
    model = Classifier(adam)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[woodbury.lightning.StepMonitor()],
        enable_checkpointing=False,
        **{"logger": False, "enable_model_summary": False, **options},
    )
    trainer.fit(model, *loaders())
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"{'Adam' if adam else 'GaussNewton'}: validation accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
    main(adam=True)
