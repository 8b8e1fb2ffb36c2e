"""The solvers of a damped quadratic model, by the names that users give them.

To add one: a final in this folder, and a name here.
"""

from __future__ import annotations

from woodbury.quadratic.by_iteration import ConjugateGradient, Products
from woodbury.quadratic.parameter_space import Cholesky
from woodbury.quadratic.quadratic import Solver

SOLVERS: dict[str, type[Solver]] = {kind.name: kind for kind in (Cholesky, ConjugateGradient, Products)}
