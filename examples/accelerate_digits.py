"""accelerate: the loop of its users, with exact natural-gradient steps.

Run it: python examples/accelerate_digits.py (a few seconds)
"""

import accelerate
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import woodbury


def main(epochs: int = 5) -> float:
    torch.manual_seed(0)
    data = load_digits()
    pictures = TensorDataset(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))
    model = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.Tanh(), torch.nn.Linear(50, 10))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = woodbury.NaturalGradient(model, criterion, lr=0.3, momentum=0.9, watch=True)
    loader = DataLoader(pictures, batch_size=60, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * len(loader))

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    print(f"last train loss {loss:.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
