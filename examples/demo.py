"""What the library is for, as one page that works offline: it opens by itself where there is a screen.

A smooth function fitted to many digits beside L-BFGS and Adam (three settings each, the same seconds for all), a
differential equation solved from its terms, and four optimizers on handwritten digits.

    python examples/demo.py     # what `make demo` does: a minute and a quarter; writes runs/demo/index.html
"""

from __future__ import annotations

import base64
import inspect
import io
import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import precision
import woodbury
from harness import Curve, options, smallest

Table = dict[str, list[Any]]
SEED = 100  # of the network and the data of the fit
POINTS = 250  # of a curve, at most
GRID = 201  # points along each axis of a picture
COMPARISON = ["compare", "digits", "--optimizers", "smw-gn,smw-ng,smw-ng-bd,sgd"]


# -- what the page shows as code


def fit_function(seconds: float = 3.0) -> woodbury.Fit:
    torch.manual_seed(100)
    inputs = 2 * torch.rand(200, 2, dtype=torch.float64) - 1
    targets = torch.sin(torch.pi * inputs[:, :1]) * torch.cos(torch.pi * inputs[:, 1:])
    layers = nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    model = nn.Sequential(*layers).double()
    return woodbury.fit(model, nn.MSELoss(), (inputs, targets), seconds=seconds)


def solution(points: Tensor) -> Tensor:
    return torch.sin(2 * torch.pi * points).mean(1, keepdim=True)


def solve_poisson(steps: int = 30) -> tuple[nn.Module, woodbury.Fit]:
    def inside(count: int) -> Tensor:
        return torch.rand(count, 2, dtype=torch.float64)

    def edges(count: int) -> Tensor:
        points, rows = inside(count), torch.arange(count)
        points[rows, rows % 2] = points[rows, rows % 2].round()
        return points

    def equation(model: nn.Module, points: Tensor) -> Tensor:
        return woodbury.laplacian(model, points).laplacian + 4 * torch.pi**2 * solution(points)

    def condition(model: nn.Module, points: Tensor) -> Tensor:
        return model(points) - solution(points)

    torch.manual_seed(0)
    layers = nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    model = nn.Sequential(*layers).double()
    terms = woodbury.Equations(equation=(inside, equation), condition=(edges, condition))
    return model, woodbury.fit(model, terms, steps=steps, seed=0)


def code_of(*functions: Any) -> str:
    """A script with these functions, which calls the last one."""
    sources = [inspect.getsource(function) for function in functions]
    head = "import torch, woodbury\nfrom torch import Tensor, nn\n"
    return "\n\n".join([head, *sources, f"result = {functions[-1].__name__}()\n"])


# -- the fit beside L-BFGS and Adam


def run_fits(seconds: float) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """(seconds, loss) along every run, and of these the best of each method."""
    print(f"Fitting sin(pi x) cos(pi y) with a 2-50-50-1 network, {seconds:g} s each:")
    fit = fit_function(seconds)
    ours = [(step["seconds"], step["loss"]) for step in fit.history]
    best = {"woodbury.fit": [*ours, (fit.seconds, fit.loss)]}
    runs = dict(best)
    for method, settings in precision.RIVALS.items():
        own = {
            f"{method}, {setting}": precision.run_rival(build, SEED, seconds) for setting, build in settings.items()
        }
        chosen = smallest({label: curve[-1][1] for label, curve in own.items()})
        best[chosen] = own[chosen]
        runs |= own
    for label, curve in runs.items():
        print(f"  {label:26} mean squared error {curve[-1][1]:8.1e}   {len(curve)} steps")
    return runs, best


def describe_fits(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """The drawing of a report, of loss against seconds and steps."""
    from woodbury.runs.config import RunConfig
    from woodbury.runs.looks import Look
    from woodbury.runs.medians import Group
    from woodbury.runs.panels import describe
    from woodbury.runs.report import Run

    looks = Look("#0072B2", "#4C97E8", "o"), Look("#D55E00", "#F07C32", "s"), Look("#666666", "#B4BAC0", "^")
    groups = []
    for (label, curve), look in zip(curves.items(), looks, strict=True):
        places = sorted({*range(0, len(curve), -(-len(curve) // POINTS)), len(curve) - 1})
        records = [
            {"epoch": place, "step": place, "seconds": curve[place][0], "train_loss": curve[place][1]}
            for place in places
        ]
        groups.append(Group(label, look, [Run(RunConfig("fit", label, {}, SEED), [], records)]))
    drawing = describe(groups)
    (panel,) = drawing.panels
    across = panel.x | {"epochs": replace(panel.x["epochs"], title="steps")}
    return asdict(replace(drawing, panels=[replace(panel, title="Mean squared error", x=across)]))


# -- the solved equation


def draw_solution(model: nn.Module) -> tuple[list[dict[str, str]], float]:
    """Pictures of u and of its error on a grid, and the relative L2 error there."""
    axis = torch.linspace(0, 1, GRID, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis).flip(1)  # x runs along a row of the picture
    with torch.no_grad():
        found, truth = model(points), solution(points)
    error = found - truth
    pictures = [picture("u, as the network found it", "viridis", found), picture("|error|", "magma", error.abs())]
    return pictures, float(error.norm() / truth.norm())


def picture(title: str, colours: str, values: Tensor) -> dict[str, str]:
    """Values on the grid as colours, with the bar that explains them."""
    low, high = float(values.min()), float(values.max())
    bar = torch.linspace(0, 1, 256).unsqueeze(0)
    image = png(values.reshape(GRID, GRID), colours)
    return {"title": title, "image": image, "bar": png(bar, colours), "low": f"{low:.1g}", "high": f"{high:.1g}"}


def png(values: Tensor, colours: str) -> str:
    """The address of an image that holds the image itself."""
    from matplotlib.image import imsave

    imsave(buffer := io.BytesIO(), values.numpy(), cmap=colours, origin="lower", format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# -- the digits


def compare_digits(out: Path, more: Sequence[str]) -> Path:
    """Run the comparison as the command line does; the folder of its report."""
    from woodbury.cli import app

    if status := app([*COMPARISON, "--out", str(out), *more], standalone_mode=False):
        raise SystemExit(status)
    return max(out.glob("digits-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))


def describe_digits(folder: Path) -> dict[str, Any]:
    """Table and verdict of the comparison."""
    from woodbury.runs import report
    from woodbury.runs.medians import ends_of, groups_of
    from woodbury.runs.panels import describe
    from woodbury.runs.verdict import takeaway

    runs = report.load([folder])
    groups = groups_of(runs)
    errors = [100 * median(ends_of(group)["test_error"]) for group in groups]
    return {
        "legend": [asdict(entry) for entry in describe(groups).legend],
        "ends": report.ends_tables(runs)["digits"],
        "takeaway": takeaway(groups, "test_error"),
        "errors": f"{len(groups)} optimizers end at test errors of {min(errors):.1f} to {max(errors):.1f} %",
        "report": f"{folder.name}/report.html",
    }


# -- the page


def has_screen() -> bool:
    """Whether someone sees a window that opens here."""
    if any(name in os.environ for name in ("CI", "TF_BUILD", "BUILD_NUMBER")):
        return False
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def main(argv: list[str] | None = None) -> None:
    numbers = {"seconds": (3.0, "for each fit"), "steps": (30, "for the equation")}
    parser = options(__doc__, "runs/demo", **numbers, epochs=(0, "on the digits; 0 for those of the preset"))
    args = parser.parse_args(argv)
    from woodbury.runs.report import fill

    torch.set_num_threads(1)
    runs, best = run_fits(args.seconds)
    print(f"Solving a Poisson equation, {args.steps} steps:")
    model, fit = solve_poisson(args.steps)
    pictures, error = draw_solution(model)
    print(f"  relative error {error:.1e} after {fit.seconds:.0f} s")
    digits = describe_digits(compare_digits(args.out, ["--epochs", str(args.epochs)] if args.epochs else []))
    ours, lbfgs, adam = (curve[-1][1] for curve in best.values())
    drawing = describe_fits(best)
    shown = {
        "verdict": f"A mean squared error of {ours:.0e} in {args.seconds:g} seconds, with nothing to set",
        "sentences": [
            f"After the same time L-BFGS has {lbfgs:.0e} and Adam {adam:.0e}, each with the best of three settings.",
            f"A network found the solution of a Poisson equation in {fit.seconds:.0f} seconds, to a relative "
            f"error of {error:.0e}.",
            f"On handwritten digits {digits['errors']}.",
        ],
        "note": f"{date.today()}, torch {torch.__version__}, one CPU thread for everything.",
        "drawing": drawing,
        "fits": [[label, f"{curve[-1][1]:.1e}", str(len(curve))] for label, curve in runs.items()],
        "fit_code": code_of(fit_function),
        "pictures": pictures,
        "error": f"{error:.1e}",
        "equation_code": code_of(solution, solve_poisson),
        "digits": digits,
        "command": " ".join(["woodbury", *COMPARISON]),
    }
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    page = args.out / "index.html"
    page.write_text(fill(template, "woodbury: a demo", shown), encoding="utf-8")
    print(f"wrote {page}")
    if has_screen():
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
