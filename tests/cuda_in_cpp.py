"""A CUDA kernel compiled as plain C++: every thread of a block a thread of the machine, barriers and all.

For one kernel at a time, with one thread block after the other, and `extern __shared__ double memory[]` as its
shared memory.
"""

import ctypes
import shutil
import subprocess

COMPILER = shutil.which("g++")

_AROUND = """
#include <barrier>
#include <cmath>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>
using namespace std;

struct Index {{ int x; }};
static thread_local Index threadIdx;
static Index blockIdx, blockDim;
static unique_ptr<barrier<>> all_here;
static double memory[{doubles}], passed_on[1024];

#define __global__
#define __device__
#define __shared__ static

static void __syncthreads() {{ all_here->arrive_and_wait(); }}

static double __shfl_down_sync(unsigned, double value, int offset) {{  // called by all threads together
    passed_on[threadIdx.x] = value;
    __syncthreads();
    const int from = threadIdx.x + offset;
    const double result = from / 32 == threadIdx.x / 32 ? passed_on[from] : value;
    __syncthreads();
    return result;
}}

{source}

extern "C" void launched(const Arguments* arguments, int blocks, int threads) {{
    blockDim.x = threads;
    all_here = make_unique<barrier<>>(threads);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {{
        for (double& number : memory) number = nan("");  // nothing may be read before it is written
        vector<thread> running;
        for (int index = threads - 1; index >= 0; --index)
            running.emplace_back([=] {{ threadIdx.x = index; {name}(*arguments); }});
        for (thread& one : running) one.join();
    }}
}}
"""


def compiled(kernel, folder, doubles=48 * 128):
    """A function (arguments, blocks, threads) that does what a launch of the kernel would."""
    source = kernel.source.replace("extern __shared__ double memory[];", "")
    text = _AROUND.format(source=source, name=kernel.name, doubles=doubles)
    (folder / "kernel.cpp").write_text(text)
    library = folder / "kernel.so"
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(folder / "kernel.cpp")], check=True)
    launched = ctypes.CDLL(str(library)).launched
    return lambda arguments, blocks, threads: launched(ctypes.byref(arguments), blocks, threads)
