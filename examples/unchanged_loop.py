"""An unchanged training loop, with exact Gauss-Newton steps: only the line that makes the optimizer differs.

Run it: python examples/unchanged_loop.py (a few seconds)
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import woodbury


def main(epochs: int = 5) -> float:
    torch.manual_seed(0)
    data = load_digits()
    pictures = TensorDataset(torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target))
    train, test = random_split(pictures, [1400, 397])
    loader = DataLoader(train, batch_size=60, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.Tanh(), torch.nn.Linear(50, 10))
    criterion = torch.nn.CrossEntropyLoss()

    optimizer = woodbury.GaussNewton(model, criterion, lr=0.3, momentum=0.9, curvature_samples=0.5, watch=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * len(loader))
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        inputs, targets = next(iter(DataLoader(test, batch_size=len(test))))
        accuracy = (model(inputs).argmax(1) == targets).float().mean().item()
    print(f"last train loss {loss:.3f}, test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
