"""Runs a function in several processes that are a group of torch.distributed, and returns what each gives."""

import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing


def _run(rank, world, folder, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
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
        context = multiprocessing.start_processes(
            _run, (world, folder, function, args), nprocs=world, join=False, start_method="spawn"
        )
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
