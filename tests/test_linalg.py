"""The small solvers and the precision of the products that feed them."""

import pytest
import torch

import bounds
import processes
from woodbury import linalg
from woodbury.linalg import factor_cholesky, reciprocal_condition, solve_conjugate_gradient, solve_factored


@pytest.mark.parametrize("blocks, size", [(1, 1), (1, 8), (3, 5)])
def test_solvers_solve_every_block(blocks, size):
    root, rhs = torch.randn(blocks, size, size + 3).double(), torch.randn(blocks, size).double()
    matrix = root @ root.mT + torch.eye(size).double()
    rhs[0] = 0.0  # a block that has converged before it starts
    exact = torch.linalg.solve(matrix, rhs.unsqueeze(-1)).squeeze(-1)
    condition = float(torch.linalg.cond(matrix).max())
    bound = bounds.rounding(size, condition) * exact.norm()
    lower, eigenvalues = factor_cholesky(matrix)[0], torch.linalg.eigvalsh(matrix)
    assert (solve_factored(lower, rhs) - exact).norm() <= bound
    least = (eigenvalues[:, 0] / eigenvalues[:, -1]).min()
    assert least <= reciprocal_condition(lower) + bounds.rounding(size)  # relative to the largest
    found = solve_conjugate_gradient(lambda x: (matrix @ x.unsqueeze(-1)).squeeze(-1), rhs, 1e-12, 500)
    assert (found.x - exact).norm() <= bound + 1e-12 * condition * exact.norm()
    assert found.ok or blocks == 1


def seen_precision():
    try:
        older = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch mixes no settings of the two kinds
        older = None
    return linalg.matmul_precision(), older


def check_full_precision(setting):
    exec(setting)
    before = seen_precision()
    with linalg.full_precision():
        assert set(linalg.matmul_precision()) <= {"ieee", "none", "highest"}, linalg.matmul_precision()
    assert seen_precision() == before, (before, seen_precision())


@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "pass",
    ],
)
def test_full_precision_holds_inside_and_leaves_the_users_setting_alone(setting):
    if "fp32_precision" in setting and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    done = processes.run_alone(check_full_precision, setting)  # torch cannot go back to the older settings
    assert done.returncode == 0, done.stderr
