"""A closure, torch's own convention: the optimizer calls the function that computes the loss.

Run it: python examples/closure.py (a few seconds)
"""

import torch
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

import woodbury


def main(steps: int = 30) -> float:
    torch.manual_seed(0)
    inputs, targets = load_diabetes(return_X_y=True)
    inputs, targets = torch.tensor(scale(inputs)), torch.tensor(scale(targets)).unsqueeze(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()

    optimizer = woodbury.GaussNewton(model, None, weight_decay=1e-3)  # no loss: it is seen in the closure

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.huber_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(steps):
        info = optimizer.step(closure)
    print(f"loss {info.loss:.4f} after {steps} steps")
    return float(info.loss)


if __name__ == "__main__":
    main()
