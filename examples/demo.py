"""What the library is for, in half a minute: a smooth function fitted to many digits, beside L-BFGS and Adam.

The problem of examples/precision.py, one seed: `woodbury.fit`, which has no setting, and L-BFGS and Adam with
three settings each, all for the same seconds. Writes a figure and a page that works offline.

    python examples/demo.py                    # writes runs/demo/fit.png and runs/demo/fit.html
"""

from __future__ import annotations

import base64
from html import escape

import torch

import precision
from harness import Curve, options, smallest

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>A fit to many digits</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .2rem 1rem .2rem 0; text-align: left }}
td:nth-child(n+2) {{ text-align: right; font-variant-numeric: tabular-nums }}
pre {{ background: #f4f4f4; padding: .8rem; overflow-x: auto }} img {{ max-width: 100% }}
tr:first-child td {{ font-weight: bold }}
</style>
<h1>A fit to many digits</h1>
<p>200 points of sin(&pi;x) cos(&pi;y), a 2-50-50-1 tanh network, float64, {seconds:g} seconds on one CPU thread
for each line. <code>woodbury.fit</code> has no setting; of the others the best of three settings is drawn.</p>
<pre>fit = woodbury.fit(model, torch.nn.MSELoss(), (inputs, targets), seconds={seconds:g})</pre>
<img alt="Mean squared error against seconds" src="data:image/png;base64,{figure}">
<table><thead><tr><th>method</th><th>mean squared error</th><th>steps</th></tr></thead>
<tbody>{rows}</tbody></table>
<p>To repeat it: <code>.venv/bin/python examples/demo.py</code>. With three seeds:
<code>.venv/bin/python examples/precision.py</code>.</p>
</html>
"""


def main(argv: list[str] | None = None) -> None:
    parser = options(
        __doc__, "runs/demo", seconds=(3.0, "for each run"), seed=(100, "of the network and the data")
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"Fitting sin(pi x) cos(pi y) with a 2-50-50-1 network, {args.seconds:g} s each:")
    lines: list[tuple[str, Curve]] = []
    best: dict[str, list[Curve]] = {}

    def show(name: str, curve: Curve) -> None:
        lines.append((name, curve))
        print(f"  {name:26} mean squared error {curve[-1][1]:8.1e}   {len(curve)} steps", flush=True)

    best["woodbury.fit"] = [precision.run_fit(args.seed, args.seconds)]
    show("woodbury.fit", best["woodbury.fit"][0])
    for method, settings in precision.RIVALS.items():
        runs = {}
        for setting, build in settings.items():
            runs[setting] = precision.run_rival(build, args.seed, args.seconds)
            show(f"{method}, {setting}", runs[setting])
        chosen = smallest({setting: curve[-1][1] for setting, curve in runs.items()})
        best[f"{method}, {chosen}"] = [runs[chosen]]
    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "fit.png"
    precision.draw(best, picture)
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{curve[-1][1]:.1e}</td><td>{len(curve)}</td></tr>"
        for name, curve in lines
    )
    figure = base64.b64encode(picture.read_bytes()).decode()
    page = args.out / "fit.html"
    page.write_text(PAGE.format(seconds=args.seconds, figure=figure, rows=rows), encoding="utf-8")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
