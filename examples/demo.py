"""What the library is for, as one page that works offline and opens by itself where there is a screen.

A smooth function fitted to many digits beside L-BFGS and Adam (three settings each, the same seconds for all), a
differential equation solved from its terms, and four optimizers on handwritten digits.

    python examples/demo.py     # what `make demo` does; writes runs/demo/index.html
"""

from __future__ import annotations

import base64
import inspect
import io
import os
import sys
import webbrowser
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.image import imsave
from torch import Tensor, nn

import precision
import woodbury
from harness import Curve, options, smallest
from woodbury.cli import app
from woodbury.runs import report
from woodbury.runs.config import RunConfig
from woodbury.runs.medians import Group, Look, ends_of, groups_of
from woodbury.runs.panels import panels_of
from woodbury.runs.verdict import takeaway

LOOKS = Look("#0072B2", "o"), Look("#D55E00", "s"), Look("#666666", "^")
POINTS = 250  # of a curve, at most
GRID = 201  # points along a side of a picture
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
    sources = "\n\n".join(inspect.getsource(function) for function in functions)
    call = f"print({functions[-1].__name__}())\n"
    return f"import torch, woodbury\nfrom torch import Tensor, nn\n\n\n{sources}\n\n{call}"


# -- the numbers and pictures of the page


def run_fits(seconds: float) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """(seconds, loss) along every run, and of these the best of each method."""
    print(f"Fitting sin(pi x) cos(pi y) with a 2-50-50-1 network, {seconds:g} s each:")
    runs: dict[str, Curve] = {}

    def note(label: str, curve: Curve) -> float:
        runs[label] = curve
        print(f"  {label:26} mean squared error {curve[-1][1]:8.1e}   {len(curve)} steps", flush=True)
        return curve[-1][1]

    note("woodbury.fit", [(step["seconds"], step["loss"]) for step in fit_function(seconds).history])
    best = ["woodbury.fit"]
    for method, settings in precision.RIVALS.items():
        named = {f"{method}, {setting}": build for setting, build in settings.items()}
        best.append(smallest({x: note(x, precision.run_rival(named[x], 100, seconds)) for x in named}))
    return runs, {label: runs[label] for label in best}


def draw_fits(curves: dict[str, Curve]) -> dict[str, Any]:
    """What a report would draw of these curves, with steps in place of epochs."""
    groups = []
    for (label, curve), look in zip(curves.items(), LOOKS, strict=True):
        places = sorted({*range(0, len(curve), -(-len(curve) // POINTS)), len(curve) - 1})
        records = [{"epoch": at, "step": at, "seconds": curve[at][0], "train_loss": curve[at][1]} for at in places]
        groups.append(Group(label, look, [report.Run(RunConfig("fit", label, {}, seed=100), [], records)]))
    (panel,) = panels_of(groups)
    across = panel.x | {"epochs": replace(panel.x["epochs"], title="steps")}
    return report.charts(groups, [replace(panel, title="Mean squared error", x=across)])


def draw_solution(model: nn.Module) -> tuple[list[dict[str, str]], float]:
    """Pictures of u and of its error, and the relative L2 error."""
    axis = torch.linspace(0, 1, GRID, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis).flip(1)  # x runs along a row of the picture
    with torch.no_grad():
        found, truth = model(points), solution(points)
    error = float((found - truth).norm() / truth.norm())
    first = picture("u, as the network found it", "viridis", found, low=float(found.min()))
    title = f"|u − solution|: relative error {written(error, 2)}"
    return [first, picture(title, "magma", (found - truth).abs(), low=0.0)], error


def picture(title: str, colours: str, values: Tensor, low: float) -> dict[str, str]:
    """Values on the grid as colours, and the bar that explains them."""
    high = float(values.max())

    def image(values: Tensor) -> str:
        imsave(file := io.BytesIO(), values.numpy(), low, high, colours, format="png", origin="lower")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    bar = image(torch.linspace(low, high, 256).unsqueeze(0))
    texts = {"title": title, "low": written(low), "high": written(high)}
    return texts | {"image": image(values.reshape(GRID, GRID)), "bar": bar}


def compare_digits(out: Path, epochs: int) -> Path:
    """Compare optimizers by the command line; the folder of the report."""
    if status := app([*COMPARISON, "--epochs", str(epochs), "--out", str(out)], standalone_mode=False):
        raise SystemExit(status)
    return max(out.glob("digits-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))


def written(value: float, digits: int = 1) -> str:
    """A few digits, of a small number with its power of ten: 5·10⁻¹⁷."""
    if not 0 < abs(value) < 0.1:
        return f"{value:.{digits}g}"
    factor, power = f"{value:.{digits - 1}e}".split("e")
    return f"{factor}·10" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def has_screen() -> bool:
    """Whether someone sees a window that opens here."""
    if any(name in os.environ for name in ("CI", "TF_BUILD", "BUILD_NUMBER")):
        return False
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def main(argv: list[str] | None = None) -> None:
    numbers = {
        "seconds": (3.0, "for each fit"),
        "steps": (30, "for the equation"),
        "epochs": (20, "on the digits"),
    }
    args = options(__doc__, "runs/demo", **numbers).parse_args(argv)
    torch.set_num_threads(1)
    runs, best = run_fits(args.seconds)
    print(f"Solving a Poisson equation, {args.steps} steps:", flush=True)
    model, fit = solve_poisson(args.steps)
    pictures, error = draw_solution(model)
    print(f"  relative error {error:.1e} after {fit.seconds:.0f} s")
    folder = compare_digits(args.out, args.epochs)
    groups = groups_of(digits := report.load([folder]))
    wrong = [100 * median(ends_of(group)["test_error"]) for group in groups]
    ours, lbfgs, adam = (written(curve[-1][1]) for curve in best.values())
    shown = {
        "verdict": f"A mean squared error of {ours} in {args.seconds:g} seconds, with nothing to set",
        "sentences": [
            f"After the same time L-BFGS has {lbfgs} and Adam {adam}, each with the best of three settings.",
            f"A network solves a Poisson equation in {fit.seconds:.0f} s to a relative error of {written(error)}.",
            f"On handwritten digits four optimizers end at test errors of {min(wrong):.1f} to {max(wrong):.1f} %.",
        ],
        "note": f"{date.today()}, torch {torch.__version__}, one CPU thread",
        "drawing": draw_fits(best),
        "fits": [[label, written(curve[-1][1], 2), str(len(curve))] for label, curve in runs.items()],
        "fit_code": code_of(fit_function),
        "pictures": pictures,
        "equation_code": code_of(solution, solve_poisson),
        "digits": report.ends_tables(digits)["digits"],
        "takeaway": takeaway(groups, "test_error"),
        "report": f"{folder.name}/report.html",
        "command": " ".join(COMPARISON),
    }
    body, page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), args.out / "index.html"
    page.write_text(report.fill(body, "woodbury: a demo", shown), encoding="utf-8")
    print(f"wrote {page}")
    if has_screen():
        webbrowser.open(page.resolve().as_uri())


if __name__ == "__main__":
    main()
