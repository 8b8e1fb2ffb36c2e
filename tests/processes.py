"""Runs a function in a process of its own, or in several that are a group of torch.distributed.

The processes are forked from one that has imported torch and woodbury and done nothing else. Each starts as a new
one would, without the seconds that the imports take.
"""

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

# What is not installed is left out. Some derivatives of torch.func import torch._dynamo.
PRELOADED = ["torch", "torch._dynamo", "woodbury", "pytest", "sklearn.datasets", "sklearn.model_selection"]
if all(find_spec(name) for name in ("typer", "rich", "matplotlib")):
    PRELOADED.append("woodbury.cli")  # which ends the process where they are missing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)


def _run(rank, world, folder, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world}
    torch.distributed.init_process_group("gloo", **place, timeout=timedelta(seconds=60))
    try:
        result = function(rank, world, *args)
    except BaseException:
        result = traceback.format_exc()
        torch.save(("failed", result), Path(folder) / f"{rank}.pt")
        raise
    torch.save(("done", result), Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(function, world, *args):
    """function(rank, world, *args) of each process."""
    with tempfile.TemporaryDirectory() as folder:
        how = {"nprocs": world, "join": False, "start_method": "forkserver"}
        context = multiprocessing.start_processes(_run, (world, folder, function, args), **how)
        try:
            while not context.join(timeout=120):
                pass
        except multiprocessing.ProcessExitedException:
            pass
        except multiprocessing.ProcessRaisedException as error:
            raise AssertionError(str(error)) from None
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for kind, result in results:
        assert kind == "done", result
    return [result for _, result in results]


def _run_alone(folder, environment, function, args):
    os.environ.clear()
    os.environ.update(environment)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(Path(folder) / name, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    function(*args)


class Started:
    """A process that runs function(*args) in the environment of the caller; what it prints is kept."""

    def __init__(self, function, *args, **environment):
        self._folder = tempfile.TemporaryDirectory()
        whole = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        self._process = SERVER.Process(target=_run_alone, args=(self._folder.name, whole, function, args))
        self._process.start()

    def is_running(self):
        return self._process.is_alive()

    def kill(self):
        self._process.kill()

    def wait(self, timeout=300):
        """Its exit status, standard output and standard error, as of subprocess.run with text=True."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        stdout, stderr = (file.read_text() if file.exists() else "" for file in files)  # killed before it had them
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._process.name, self._process.exitcode, stdout, stderr)


def run_alone(function, *args, **environment):
    return Started(function, *args, **environment).wait()


def command(*arguments):
    """What `woodbury ARGUMENTS` does, for `run_alone`."""
    from woodbury.cli import main

    sys.argv = ["woodbury", *map(str, arguments)]
    main()


def free_port():
    """A port of this machine that nobody listens to."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]
