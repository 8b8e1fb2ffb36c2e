"""The system in sample space on a CUDA device, from Z Z^T to c, |p|^2 and |U p|^2 by one kernel.

A small step there is bound by the number of its operations, and `woodbury.linalg.solve_in_sample_space` takes
fifteen, two of them (Cholesky, triangular solves) as dear as five. Here a thread block for each block of B does
all of it in shared memory: that function is the reference, and what larger systems and other machines use.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from woodbury.device.cuda import Kernel

_THREADS = 512
_MOST_ROWS, _MOST_CURVATURE_ROWS = 256, 96  # of Z, of U: beyond, the library gains on one thread block
_SHARED_BYTES = 47 * 1024  # what every device has, less what the sums take

_SOURCE = """
typedef %s T;

struct Arguments {
    const T* gram;          // Z Z^T (b, r, r)
    const T* e;             // (m,), null for ones
    const double* damping;  // lambda
    T* c;                   // (b, r)
    double* numbers;        // (b, 3): |p|^2, |U p|^2, and 0 where Z Z^T + D lambda I is positive definite
    double divisor, count;  // D, M
    int m, r;
};

__device__ double sum_of_all(double value, double* sums) {
    for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
    __syncthreads();
    if (threadIdx.x %% 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    double total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
    return total;
}

extern "C" __global__ void small_system(const Arguments a) {
    const int m = a.m, r = a.r, width = m | 1;  // odd: no bank conflicts
    const int me = threadIdx.x, all = blockDim.x, lane = me %% 32, warp = me / 32, warps = all / 32;
    const T* gram = a.gram + (size_t)blockIdx.x * r * r;
    extern __shared__ double memory[];
    __shared__ double sums[32];
    T* matrix = (T*)memory;         // (m + 1, width): the right-hand side is one more row to eliminate from
    T* w = matrix + m * width;
    T* x = w + width;               // (r,)
    const double lambda = *a.damping;
    const T shift = T(a.divisor * lambda), length = T(a.count * lambda);

    for (int i = warp; i < m; i += warps)
        for (int j = lane; j <= i; j += 32) matrix[i * width + j] = gram[i * r + j] + (i == j ? shift : T(0));
    for (int i = me; i < m; i += all) {  // D lambda e - M Z g_rest
        double rest = 0;
        for (int j = m; j < r; ++j) rest += double(gram[j * r + i]);
        w[i] = (a.e ? a.e[i] : T(1)) * shift - T(rest);
    }
    __syncthreads();

    int failed = 0;
    for (int k = 0; k < m; ++k) {  // L L^T = Z Z^T + D lambda I, w <- L^-1 w
        const T pivot = matrix[k * width + k];
        if (!(pivot > T(0) && pivot - pivot == T(0))) {  // not positive, not a number, infinite
            failed = k + 1;
            break;
        }
        const T diagonal = sqrt(pivot);
        for (int i = k + 1 + me; i <= m; i += all) matrix[i * width + k] /= diagonal;
        __syncthreads();
        if (me == 0) matrix[k * width + k] = diagonal;
        for (int i = k + 1 + warp; i <= m; i += warps) {
            const T factor = matrix[i * width + k];
            for (int j = k + 1 + lane; j <= i && j < m; j += 32)
                matrix[i * width + j] -= factor * matrix[j * width + k];
        }
        __syncthreads();
    }
    for (int k = m - 1; k >= 0; --k) {  // x = L^-T w
        const T value = failed ? T(nan("")) : w[k] / matrix[k * width + k];
        if (me == 0) x[k] = value;
        for (int j = me; j < k; j += all) w[j] -= matrix[k * width + j] * value;
        __syncthreads();
    }

    double bend = 0, squared = 0;
    for (int i = me; i < r; i += all) {
        if (i < m) {
            const double gap = double(a.e ? a.e[i] : T(1)) - double(x[i]);
            bend += gap * gap;
        }
        x[i] = (i < m ? x[i] : T(1)) / length;
        a.c[(size_t)blockIdx.x * r + i] = x[i];
    }
    __syncthreads();
    for (int i = me; i < r; i += all) {
        double image = 0;
        for (int j = 0; j < r; ++j) image += double(gram[j * r + i]) * double(x[j]);
        squared += double(x[i]) * image;
    }
    bend = sum_of_all(bend, sums);
    squared = sum_of_all(squared, sums);
    if (me == 0) {
        double* numbers = a.numbers + 3 * blockIdx.x;
        numbers[0] = squared;
        numbers[1] = bend * a.divisor / (a.count * a.count);
        numbers[2] = failed;
    }
}
"""

_KERNELS = {
    torch.float32: Kernel("small_system", _SOURCE % "float"),
    torch.float64: Kernel("small_system", _SOURCE % "double"),
}


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gram", "e", "damping", "c", "numbers")),
        *((name, ctypes.c_double) for name in ("divisor", "count")),
        *((name, ctypes.c_int) for name in ("m", "r")),
    )


def fits(gram: Tensor, curvature_rows: int, e: Tensor | None) -> bool:
    """Whether the kernel can take Z Z^T (b, r, r) with so many factor rows, and e."""
    rows = gram.shape[-1]
    return (
        gram.is_cuda
        and (e is None or (e.shape == (curvature_rows,) and e.device == gram.device))
        and gram.dtype in _KERNELS
        and gram.shape[-2] == rows <= _MOST_ROWS
        and curvature_rows <= _MOST_CURVATURE_ROWS
        and _shared(gram, curvature_rows) <= _SHARED_BYTES
        and gram.is_contiguous()
    )


def solved(
    gram: Tensor, curvature_rows: int, divisor: float, count: float, e: Tensor | None, damping: Tensor
) -> tuple[Tensor, Tensor] | None:
    """c (b, r), and |p|^2, |U p|^2 and whether it failed (not 0) as doubles (3,); None without a kernel.

    damping is lambda, a 0-dim tensor in double on the same device; the rest as for
    `woodbury.linalg.solve_in_sample_space`.
    """
    blocks, rows = gram.numel() // gram.shape[-1] ** 2, gram.shape[-1]
    e = e if e is None else e.to(gram.dtype).contiguous()
    c = gram.new_empty(gram.shape[:-1])
    numbers = gram.new_empty((blocks, 3), dtype=torch.float64)
    arguments = _Arguments(
        gram.data_ptr(),
        0 if e is None else e.data_ptr(),
        damping.data_ptr(),
        c.data_ptr(),
        numbers.data_ptr(),
        divisor,
        count,
        curvature_rows,
        rows,
    )
    shared = _shared(gram, curvature_rows)
    if not _KERNELS[gram.dtype].launch(gram.device, blocks, _THREADS, shared, arguments):
        return None
    return c, numbers[0] if blocks == 1 else numbers.sum(0)


def _shared(gram: Tensor, curvature_rows: int) -> int:
    width = curvature_rows | 1
    return ((curvature_rows + 1) * width + gram.shape[-1]) * gram.element_size()
