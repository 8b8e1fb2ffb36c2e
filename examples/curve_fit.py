"""Nonlinear least squares with woodbury, beside scipy.optimize.least_squares(method="lm") (MINPACK).

Eighteen classical problems: curves of the NIST Statistical Reference Datasets, each from its two published
starting points, with parameters certified to eleven digits (https://www.itl.nist.gov/div898/strd/), and test
functions of Moré, Garbow and Hillstrom (1981), whose minima are known. To fit a curve:

    result = woodbury.least_squares(lambda b: b[0] * (1 - torch.exp(-b[1] * x)) - y, [500.0, 0.0001])
    result.x, result.cost, result.njev

woodbury has its default settings. scipy gets the same residuals and exact Jacobians (autograd), its scaling by the
Jacobian and tolerances of eps = 2.2e-16, as small as it takes them. Both get the problems in their own units.
The two take nearly the same steps until the sum of squares is flat to half its digits. From there on woodbury
judges steps by gradients, and learns from them what the Hessian has beside J^T J. scipy ends where the sum is flat
to its last digit, its parameters up to 4e-7 away from the minimum. Jacobians are those of all steps (njev), points
those at which the residuals were computed (nfev).

Columns, all relative to the parameter (one that is 0 at the solution: to the largest):

    agree       the largest difference between the parameters of woodbury and scipy
    lm, trf     that between two methods of scipy, "lm" and "trf", with the same settings
    minimum     how far each of the two is from the minimum: scipy's end, taken to where the gradient J^T f is zero
                by scipy.optimize.root
    certified   how far woodbury is from the certified parameters, which have eleven digits

A row says "yes" if the two agree to 1e-8 in at most twice scipy's Jacobians; "scipy's error" if they do not, but
woodbury is within 1e-8 of the minimum that scipy was heading for. From BoxBOD (1) both end on a plateau, away from
the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import woodbury
from harness import BLUE, ORANGE, figure, options

TOLERANCE = torch.finfo(torch.float64).eps
AGREEMENT = 1e-8


@dataclass(frozen=True)
class Problem:
    """Fit function(x, b1, b2, ...) to y, or solve function(x, ...) = 0 where y is None."""

    function: Callable[..., Tensor]
    inputs: Tensor  # (n, anything)
    targets: Tensor | None  # (n, 1)
    starts: tuple[tuple[float, ...], ...]
    minimum: float  # sum of squares at the solution, as published
    certified: tuple[float, ...] | None = None  # the solution, as published

    def residuals(self, b: Tensor) -> Tensor:
        values = self.function(self.inputs, *b)
        return (values if self.targets is None else values - self.targets).flatten()

    def sum_of_squares(self, b: Tensor) -> float:
        return self.residuals(b).square().sum().item()


def curve(function: Callable[..., Tensor], data: str, *rest: Any) -> Problem:
    """A problem with one predictor; data is "x y, x y, ..."."""
    pairs = [[float(value) for value in pair.split()] for pair in data.split(",")]
    table = torch.tensor(pairs, dtype=torch.float64)
    return Problem(function, table[:, :1], table[:, 1:], *rest)


def system(residuals: Callable[..., list[Tensor]], *rest: Any) -> Problem:
    """A few equations without data: one sample, one output for each."""
    one = torch.zeros(1, 1, dtype=torch.float64)
    return Problem(lambda x, *b: torch.stack(residuals(*b)).expand(len(x), -1), one, None, *rest)


def bard() -> Problem:
    u = torch.arange(1.0, 16.0, dtype=torch.float64)
    y = "0.14 0.18 0.22 0.25 0.29 0.32 0.35 0.39 0.37 0.58 0.73 0.96 1.34 2.10 4.39"
    return Problem(
        lambda x, a, b, c: a + x[:, :1] / (b * x[:, 1:2] + c * x[:, 2:]),
        torch.stack([u, 16 - u, torch.minimum(u, 16 - u)], dim=1),
        torch.tensor([[float(value)] for value in y.split()], dtype=torch.float64),
        ((1, 1, 1),),
        8.214877306578963e-3,
    )


def helical_valley(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    turn = torch.atan2(b, a) / (2 * math.pi)
    return [10 * (c - 10 * torch.where(turn < -0.25, turn + 1, turn)), 10 * ((a * a + b * b).sqrt() - 1), c]


def at(times: list[float], target: Callable[[float], float] = lambda t: 0.0) -> str:
    """Data "t y, t y, ..." of a test function whose targets follow a formula."""
    return ", ".join(f"{t!r} {target(t)!r}" for t in times)


exp = torch.exp
# fmt: off
PROBLEMS: dict[str, Problem] = {
    # NIST, by the name there. MGH09 is Kowalik and Osborne's problem, MGH17 Osborne's first.
    "Misra1a": curve(
        lambda x, a, b: a * (1 - exp(-b * x)),
        """
        77.6 10.07,  114.9 14.73,  141.1 17.94,  190.8 23.93,  239.9 29.61,  289 35.18,  332.8 40.02,
        378.4 44.82,  434.8 50.76,  477.3 55.05,  536.8 61.01,  593.1 66.4,  689.1 75.47,  760 81.78
        """,
        ((500, 0.0001), (250, 0.0005)),
        1.2455138894e-01, (2.3894212918e+02, 5.5015643181e-04),
    ),
    "Chwirut2": curve(
        lambda x, a, b, c: exp(-a * x) / (b + c * x),
        """
        0.5 92.9,  1 57.1,  1.75 31.05,  3.75 11.5875,  5.75 8.025,  0.875 63.6,  2.25 21.4,  3.25 14.25,
        5.25 8.475,  0.75 63.8,  1.75 26.8,  2.75 16.4625,  4.75 7.125,  0.625 67.3,  1.25 41,  2.25 21.15,
        4.25 8.175,  0.5 81.5,  3 13.12,  0.75 59.9,  3 14.62,  1.5 32.9,  6 5.44,  3 12.56,  6 5.44,
        1.5 32,  3 13.95,  0.5 75.8,  2 20,  4 10.42,  0.75 59.5,  2 21.67,  5 8.55,  0.75 62,  2.25 20.2,
        3.75 7.76,  5.75 3.75,  3 11.81,  0.75 54.7,  2.5 23.7,  4 11.55,  0.75 61.3,  2.5 17.7,  4 8.74,
        0.75 59.2,  2.5 16.3,  4 8.62,  0.5 81,  6 4.87,  3 14.62,  0.5 81.7,  2.75 17.17,  0.5 81.3,
        1.75 28.9
        """,
        ((0.1, 0.01, 0.02), (0.15, 0.008, 0.01)),
        5.1304802941e+02, (1.6657666537e-01, 5.1653291286e-03, 1.2150007096e-02),
    ),
    "DanWood": curve(
        lambda x, a, b: a * x**b,
        """
        1.309 2.138,  1.471 3.421,  1.49 3.597,  1.565 4.34,  1.611 4.882,  1.68 5.66
        """,
        ((1, 5), (0.7, 4)),
        4.3173084083e-03, (7.6886226176e-01, 3.8604055871e+00),
    ),
    "Thurber": curve(
        lambda x, a, b, c, d, e, f, g: (a + x * (b + x * (c + x * d))) / (1 + x * (e + x * (f + x * g))),
        """
        -3.067 80.574,  -2.981 84.248,  -2.921 87.264,  -2.912 87.195,  -2.84 89.076,  -2.797 89.608,
        -2.702 89.868,  -2.699 90.101,  -2.633 92.405,  -2.481 95.854,  -2.363 100.696,  -2.322 101.06,
        -1.501 401.672,  -1.46 390.724,  -1.274 567.534,  -1.212 635.316,  -1.1 733.054,  -1.046 759.087,
        -0.915 894.206,  -0.714 990.785,  -0.566 1090.109,  -0.545 1080.914,  -0.4 1122.643,
        -0.309 1178.351,  -0.109 1260.531,  -0.103 1273.514,  0.01 1288.339,  0.119 1327.543,
        0.377 1353.863,  0.79 1414.509,  0.963 1425.208,  1.006 1421.384,  1.115 1442.962,  1.572 1464.35,
        1.841 1468.705,  2.047 1447.894,  2.2 1457.628
        """,
        ((1000, 1000, 400, 40, 0.7, 0.3, 0.03), (1300, 1500, 500, 75, 1, 0.4, 0.05)),
        5.6427082397e+03, (1.2881396800e+03, 1.4910792535e+03, 5.8323836877e+02, 7.5416644291e+01,
                           9.6629502864e-01, 3.9797285797e-01, 4.9727297349e-02),
    ),
    "Eckerle4": curve(
        lambda x, a, b, c: a / b * exp(-0.5 * ((x - c) / b) ** 2),
        """
        400 0.0001575,  405 0.0001699,  410 0.000235,  415 0.0003102,  420 0.0004917,  425 0.000871,
        430 0.0017418,  435 0.00464,  436.5 0.0065895,  438 0.0097302,  439.5 0.0149002,  441 0.023731,
        442.5 0.0401683,  444 0.0712559,  445.5 0.1264458,  447 0.2073413,  448.5 0.2902366,  450 0.3445623,
        451.5 0.3698049,  453 0.3668534,  454.5 0.3106727,  456 0.2078154,  457.5 0.1164354,  459 0.0616764,
        460.5 0.03372,  462 0.0194023,  463.5 0.0117831,  465 0.0074357,  470 0.0022732,  475 0.00088,
        480 0.0004579,  485 0.0002345,  490 0.0001586,  495 0.0001143,  500 7.1e-05
        """,
        ((1, 10, 500), (1.5, 5, 450)),
        1.4635887487e-03, (1.5543827178e+00, 4.0888321754e+00, 4.5154121844e+02),
    ),
    "Rat43": curve(
        lambda x, a, b, c, d: a / (1 + exp(b - c * x)) ** (1 / d),
        """
        1 16.08,  2 33.83,  3 65.8,  4 97.2,  5 191.55,  6 326.2,  7 386.87,  8 520.53,  9 590.03,
        10 651.92,  11 724.93,  12 699.56,  13 689.96,  14 637.56,  15 717.41
        """,
        ((100, 10, 1, 1), (700, 5, 0.75, 1.3)),
        8.7864049080e+03, (6.9964151270e+02, 5.2771253025e+00, 7.5962938329e-01, 1.2792483859e+00),
    ),
    "BoxBOD": curve(
        lambda x, a, b: a * (1 - exp(-b * x)),
        """
        1 109,  2 149,  3 149,  5 191,  7 213,  10 224
        """,
        ((1, 1), (100, 0.75)),
        1.1680088766e+03, (2.1380940889e+02, 5.4723748542e-01),
    ),
    "MGH09": curve(
        lambda x, a, b, c, d: a * (x * x + x * b) / (x * x + x * c + d),
        """
        4 0.1957,  2 0.1947,  1 0.1735,  0.5 0.16,  0.25 0.0844,  0.167 0.0627,  0.125 0.0456,  0.1 0.0342,
        0.0833 0.0323,  0.0714 0.0235,  0.0625 0.0246
        """,
        ((25, 39, 41.5, 39), (0.25, 0.39, 0.415, 0.39)),
        3.0750560385e-04, (1.9280693458e-01, 1.9128232873e-01, 1.2305650693e-01, 1.3606233068e-01),
    ),
    "MGH17": curve(
        lambda x, a, b, c, d, e: a + b * exp(-x * d) + c * exp(-x * e),
        """
        0 0.844,  10 0.908,  20 0.932,  30 0.936,  40 0.925,  50 0.908,  60 0.881,  70 0.85,  80 0.818,
        90 0.784,  100 0.751,  110 0.718,  120 0.685,  130 0.658,  140 0.628,  150 0.603,  160 0.58,
        170 0.558,  180 0.538,  190 0.522,  200 0.506,  210 0.49,  220 0.478,  230 0.467,  240 0.457,
        250 0.448,  260 0.438,  270 0.431,  280 0.424,  290 0.42,  300 0.414,  310 0.411,  320 0.406
        """,
        ((50, 150, -100, 1, 2), (0.5, 1.5, -1, 0.01, 0.02)),
        5.4648946975e-05,
        (3.7541005211e-01, 1.9358469127e+00, -1.4646871366e+00, 1.2867534640e-02, 2.2122699662e-02),
    ),
    "Lanczos3": curve(
        lambda x, a, b, c, d, e, f: a * exp(-b * x) + c * exp(-d * x) + e * exp(-f * x),
        """
        0 2.5134,  0.05 2.0443,  0.1 1.6684,  0.15 1.3664,  0.2 1.1232,  0.25 0.9269,  0.3 0.7679,
        0.35 0.6389,  0.4 0.5338,  0.45 0.4479,  0.5 0.3776,  0.55 0.3197,  0.6 0.272,  0.65 0.2325,
        0.7 0.1997,  0.75 0.1723,  0.8 0.1493,  0.85 0.1301,  0.9 0.1138,  0.95 0.1,  1 0.0883,
        1.05 0.0783,  1.1 0.0698,  1.15 0.0624
        """,
        ((1.2, 0.3, 5.6, 5.5, 6.5, 7.6), (0.5, 0.7, 3.6, 4.2, 4, 6.3)),
        1.6117193594e-08, (8.6816414977e-02, 9.5498101505e-01, 8.4400777463e-01, 2.9515951832e+00,
                           1.5825685901e+00, 4.9863565084e+00),
    ),
    # Moré, Garbow and Hillstrom
    "Rosenbrock": system(lambda a, b: [10 * (b - a * a), 1 - a], ((-1.2, 1),), 0.0, (1, 1)),
    "Beale": system(
        lambda a, b: [1.5 - a * (1 - b), 2.25 - a * (1 - b**2), 2.625 - a * (1 - b**3)], ((1, 1),), 0.0, (3, 0.5)
    ),
    "Helical valley": system(helical_valley, ((-1, 0, 0),), 0.0, (1, 0, 0)),
    "Freudenstein-Roth": system(
        lambda a, b: [-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b],
        ((0.5, -2),), 48.98425367924,
    ),
    "Bard": bard(),
    "Box 3-d": curve(
        lambda x, a, b, c: exp(-x * a) - exp(-x * b) - c * (exp(-x) - exp(-10 * x)),
        at([i / 10 for i in range(1, 11)]), ((0, 10, 20),), 0.0,
    ),
    "Jennrich-Sampson": curve(
        lambda x, a, b: exp(x * a) + exp(x * b),
        at([float(i) for i in range(1, 11)], lambda t: 2 + 2 * t), ((0.3, 0.4),), 124.362182355615,
    ),
    "Brown-Dennis": curve(
        lambda x, a, b, c, d: (a + x * b - exp(x)) ** 2 + (c + d * x.sin() - x.cos()) ** 2,
        at([i / 5 for i in range(1, 21)]), ((25, 5, -5, -1),), 85822.2016263563,
    ),
}
# fmt: on
IN_THE_FIGURE = ("Chwirut2", "Thurber", "Eckerle4", "Rat43")


@dataclass
class Fit:
    """The parameters at the end, and at the start and after every step."""

    parameters: Tensor
    path: list[Tensor]
    jacobians: int
    points: int


def fit(problem: Problem, start: tuple[float, ...]) -> Fit:
    """By woodbury.least_squares."""
    path = [torch.tensor(start, dtype=torch.float64)]
    result = woodbury.least_squares(problem.residuals, path[0], callback=path.append)
    moved = [path[0], *(b for a, b in pairwise(path) if not torch.equal(a, b))]
    return Fit(result.x, moved, result.njev, result.nfev)


def reference(problem: Problem, start: tuple[float, ...], method: str = "lm") -> Fit:
    """By scipy, with the same residuals and exact Jacobians; "lm" is MINPACK."""
    import numpy
    from scipy.optimize import least_squares

    path = []

    def jacobian(b: Any) -> Any:
        path.append(torch.tensor(b))
        return torch.func.jacrev(problem.residuals)(path[-1]).numpy()

    with numpy.errstate(over="ignore"):  # of trials far out, which are rejected
        result = least_squares(
            lambda b: problem.residuals(torch.tensor(b)).numpy(),
            torch.tensor(start, dtype=torch.float64).numpy(),
            jac=jacobian,
            method=method,
            x_scale="jac",  # MINPACK's own scaling
            ftol=TOLERANCE,
            xtol=TOLERANCE,
            gtol=TOLERANCE,
            max_nfev=2000,
        )
    # the last Jacobian is that of the result
    return Fit(torch.tensor(result.x), path, result.njev, result.nfev)


def stationary_point(problem: Problem, near: Tensor) -> Tensor:
    """Where the cosines of the residuals with the columns of the Jacobian are zero, by scipy.optimize.root."""
    from scipy.optimize import root

    unit = torch.where(near == 0, 1.0, near.abs())

    def cosines(b: Any) -> Any:
        J = torch.func.jacrev(problem.residuals)(torch.tensor(b) * unit)
        f = problem.residuals(torch.tensor(b) * unit)
        return (J.T @ f / (J.norm(dim=0) * f.norm()).clamp(min=1e-300)).numpy()

    return torch.tensor(root(cosines, (near / unit).numpy(), tol=1e-15).x) * unit


def distance(parameters: Tensor, reference: Tensor) -> float:
    """The largest relative difference of a parameter."""
    size = torch.maximum(reference.abs(), AGREEMENT * reference.abs().max())
    return ((parameters - reference).abs() / size).max().item()


@dataclass
class Row:
    """One problem from one starting point."""

    name: str
    start: int
    problem: Problem
    ours: Fit
    scipys: Fit
    minimum: Tensor  # from scipy's end on
    trf: Fit  # by scipy's other method

    @property
    def agreement(self) -> float:
        return distance(self.ours.parameters, self.scipys.parameters)

    @property
    def among_scipy(self) -> float:
        return distance(self.trf.parameters, self.scipys.parameters)

    @property
    def from_minimum(self) -> float:
        return distance(self.ours.parameters, self.minimum)

    @property
    def is_quick(self) -> bool:
        return self.ours.jacobians <= 2 * self.scipys.jacobians

    @property
    def is_good(self) -> bool:
        return self.is_quick and self.agreement <= AGREEMENT

    @property
    def is_good_at_the_minimum(self) -> bool:
        return self.is_quick and self.from_minimum <= AGREEMENT

    def line(self) -> str:
        name = self.name + (f" ({self.start})" if len(self.problem.starts) > 1 else "")
        ours, scipys = self.ours, self.scipys
        certified = ""
        if self.problem.certified is not None:
            best = torch.tensor(self.problem.certified, dtype=torch.float64)
            certified = f"{distance(ours.parameters, best):.0e}"
        if self.is_good:
            verdict = "yes"
        elif self.is_good_at_the_minimum:
            verdict = "scipy's error"
        else:
            verdict = "no" if self.is_quick else "steps"
        sizes = f"{len(ours.parameters):3}{self.problem.residuals(ours.parameters).numel():5}"
        counts = f"{ours.jacobians:7}{scipys.jacobians:6}{ours.points:8}{scipys.points:6}"
        distances = f"{self.from_minimum:10.0e}{distance(scipys.parameters, self.minimum):8.0e}{certified:>8}"
        return f"{name:18}{sizes}{counts}{self.agreement:10.1e}{self.among_scipy:9.0e}{distances}  {verdict}"


HEADER = (
    f"{'':26}{'Jacobians':>13}{'points':>14}{'':19}{'from minimum':>18}{'from':>8}\n"
    f"{'problem (start)':18}  p    m   ours scipy    ours scipy     agree  lm, trf"
    "      ours   scipy    cert  1e-8 in 2 njev"
)


def compare(name: str, start: int) -> Row:
    problem = PROBLEMS[name]
    point = problem.starts[start - 1]
    scipys = reference(problem, point)
    minimum = stationary_point(problem, scipys.parameters)
    return Row(name, start, problem, fit(problem, point), scipys, minimum, reference(problem, point, "trf"))


def draw(rows: list[Row], path: Path) -> None:
    """Data, first guess and fits above; how far the parameters are from the minimum below."""
    with figure(path, 2, len(rows), dpi=100, figsize=(3 * len(rows) + 0.6, 5.8)) as (picture, axes):
        for row, above, below in zip(rows, *axes, strict=True):
            x, y = row.problem.inputs[:, 0], row.problem.targets[:, 0]
            grid = torch.linspace(x.min().item(), x.max().item(), 300, dtype=torch.float64).unsqueeze(1)
            guess = row.problem.function(
                grid, *torch.tensor(row.problem.starts[row.start - 1], dtype=torch.float64)
            )
            above.plot(grid, guess, color="#999999", linewidth=1, linestyle=":", label="first guess")
            curves = [row.problem.function(grid, *side.parameters) for side in (row.ours, row.scipys)]
            above.plot(grid, curves[0], color=BLUE, linewidth=2, label="woodbury")
            above.plot(grid, curves[1], color=ORANGE, linewidth=1.2, linestyle="--", label="scipy lm")
            above.plot(x, y, "o", color="black", markersize=2.8, alpha=0.7, label="data")
            margin = 0.06 * (y.max() - y.min()).item()
            above.set_ylim(y.min().item() - 2 * margin, y.max().item() + 2 * margin)
            above.set_title(f"{row.name} ({row.start})")
            errors = [[distance(b, row.minimum) for b in side.path] for side in (row.ours, row.scipys)]
            below.plot(errors[0], "o-", color=BLUE, markersize=4.5, linewidth=1, label="woodbury.least_squares")
            below.plot(errors[1], "s--", color=ORANGE, markersize=2, linewidth=1, label="scipy lm")
            below.set(yscale="log", xlabel="steps")
            above.grid(visible=False)
        axes[0, 0].legend(fontsize="small")
        picture.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        axes[1, 0].set_ylabel("largest relative error\nof a parameter")


def main(argv: list[str] | None = None) -> list[Row]:
    parser = options(__doc__, "curve_fit.png")
    parser.add_argument("--problems", default=",".join(PROBLEMS), help="names, separated by commas (default: all)")
    parser.add_argument("--starts", type=int, choices=(1, 2), help="one starting point only (default: both)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = args.problems.split(",")
    for name in names:
        if name not in PROBLEMS:
            parser.error(f"no problem {name!r}; there are {', '.join(PROBLEMS)}")
    print(HEADER)
    rows = []
    for name in names:
        starts = len(PROBLEMS[name].starts)
        for start in range(1, starts + 1) if args.starts is None else [min(args.starts, starts)]:
            rows.append(compare(name, start))
            print(rows[-1].line(), flush=True)
    for what, good in (
        ("woodbury and scipy", [row for row in rows if row.is_good]),
        ("woodbury and scipy's minimum", [row for row in rows if row.is_good_at_the_minimum]),
        ("scipy's lm and its trf", [row for row in rows if row.among_scipy <= AGREEMENT]),
    ):
        problems = len({row.name for row in good})
        print(f"{what} agree to 1e-8: {len(good)} of {len(rows)} rows, {problems} of {len(names)} problems")
    first = {row.name: row for row in reversed(rows)}
    shown = [first[name] for name in IN_THE_FIGURE if name in first]
    if shown:
        draw(shown, args.out)
    return rows


if __name__ == "__main__":
    main()
