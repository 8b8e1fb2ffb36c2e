"""How every figure looks, as settings of matplotlib: one font, thin grey axes, the title at the left."""

from typing import Any

STYLE: Any = {  # Any: matplotlib types the keys as a literal of every setting
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
