"""Runs a benchmark as W processes over one or several hosts: `launch` in the parent, `join` in each rank."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import hosts


def launch(
    module: str, arguments: Sequence[str], num_hosts: int, ranks_per_host: int = 1, rate: str | None = None
) -> None:
    """Run `python -m module *arguments` as num_hosts * ranks_per_host ranks, consecutive ones on a host, and wait.

    The environment is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `rate` as in `network.hosts`; without one
    every host is this machine over loopback. Raises SystemExit naming the ranks that failed; the others are killed.
    """
    W = num_hosts * ranks_per_host
    with hosts(num_hosts, rate) as places:
        shared = {
            **os.environ,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(W),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(free_port()),
        }
        processes = [
            subprocess.Popen(
                [*place.command, sys.executable, "-m", module, *arguments],
                env={**shared, **place.environment, "RANK": str(rank)},
            )
            for rank, place in enumerate(places[rank // ranks_per_host] for rank in range(W))
        ]
        failed = _ended(processes)
    if failed:
        raise SystemExit(f"ranks {failed} failed")


def reported(module: str, arguments: Sequence[str], *hosts: Any) -> Any:
    """`launch`, and what rank 0 writes as JSON to the file it is given as `--json`, which comes last and so counts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        launch(module, [*arguments, "--json", str(out)], *hosts)
        return json.loads(out.read_text())


def is_rank() -> bool:
    """Whether this process is one that `launch` started."""
    return "RANK" in os.environ


@contextlib.contextmanager
def join() -> Iterator[int]:
    """In a rank: one thread, the default process group over gloo; gives the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _ended(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all; after a first failure the others, which may wait for that rank, are killed. Who failed by then."""
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or None not in codes:
                return failed
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
