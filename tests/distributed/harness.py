"""Real processes for tests: W ranks over gloo, one thread each, every wait bounded.

    run(2, function, 3)              two new processes; [function(3) on rank 0, function(3) on rank 1]
    with Ranks() as ranks:           the same processes again and again: importing torch takes seconds
        ranks.run(4, function, 3)

`function` lives at the top level of an importable module; what it takes and returns is pickled. Each call of `run` has a
process group of its own. A failure on any rank, or no answer in time, ends all processes and is raised here.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 2.0
"""After a first failure: how long the other ranks may take to answer for themselves before all are ended."""


class RankFailure(Exception):
    """Some ranks raised. `rank` is the first of them, `error` what it raised (None if that cannot be pickled).

    `texts` maps every rank that raised to its traceback.
    """

    def __init__(self, rank: int, error: BaseException | None, texts: dict[int, str]):
        self.rank, self.error, self.texts = rank, error, texts
        super().__init__(f"rank {rank} failed\n{texts[rank]}")


class Ranks:
    """Processes that live until `close`, started when first needed and again after a failure."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._number = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`function(*args)` on each of `world_size` ranks; the results by rank.

        Raises RankFailure if a rank raised or died, TimeoutError naming the ranks that did not answer in `timeout_s`
        seconds, which start when all processes are up.
        """
        workers = self._started(world_size)
        self._number += 1
        job = pickle.dumps((function, args))
        for rank, worker in enumerate(workers):
            worker.send((sys.path, self._number, rank, world_size, timeout_s, job))
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[BaseException | None, str]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) + len(failures) < world_size:
            waiting = {w.connection: r for r, w in enumerate(workers) if r not in answers and r not in failures}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answer = workers[rank].receive()
                if isinstance(answer, _Failed):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[rank] = (answer.error, answer.text)
                else:
                    answers[rank] = answer
        missing = [r for r in range(world_size) if r not in answers and r not in failures]
        if missing or any(not w.process.is_alive() for w in workers):
            self.close(grace_s=0.0)
        if failures:
            first = next(iter(failures))
            error = failures[first][0]
            raise RankFailure(first, error, {rank: text for rank, (_, text) in failures.items()}) from error
        if missing:
            raise TimeoutError(f"ranks {missing} of {world_size} did not end within {timeout_s:g} s")
        return [answers[rank] for rank in range(world_size)]

    def _started(self, world_size: int) -> list[_Worker]:
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        if self._store is None:
            # Port 0: the system picks one that is free and it is never given up again.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = [_Worker(self._store.port) for _ in range(world_size - len(self._workers))]
        self._workers += new
        for worker in new:
            worker.wait_until_up()
        return self._workers[:world_size]

    def close(self, grace_s: float = 10.0) -> None:
        """End all processes: an idle one leaves by itself when its pipe closes, what is left after a while is killed."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.join()
        self._workers = []
        self._store = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`Ranks.run` in processes of this one call."""
    with Ranks() as ranks:
        return ranks.run(world_size, function, *args, timeout_s=timeout_s)


class _Failed:
    def __init__(self, error: BaseException | None, text: str):
        self.error, self.text = error, text


class _Worker:
    """One process and the pipe to it. Messages are pickled here: those of torch share memory through file descriptors."""

    START_S = 120.0

    def __init__(self, port: int):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_up(self) -> None:
        if not self.connection.poll(self.START_S) or self.receive() != "up":
            raise RuntimeError(f"a process did not start within {self.START_S:g} s")

    def send(self, message: Any) -> None:
        self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_S)
            return _Failed(None, f"the process died with exit code {self.process.exitcode}")


def _serve(connection: multiprocessing.connection.Connection, port: int) -> None:
    """What a process does: take a job, join a group, run the function, answer."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send_bytes(pickle.dumps("up"))
    while True:
        try:
            path, number, rank, world_size, timeout_s, job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path += [entry for entry in path if entry not in sys.path]
        own = dist.PrefixStore(f"job{number}", store)
        answer = _answer(own, rank, world_size, timeout_s, job)
        if isinstance(answer, _Failed):  # first, since what follows may hang after a failure
            connection.send_bytes(pickle.dumps(answer))
        _leave(own, rank, world_size)
        if not isinstance(answer, _Failed):
            connection.send_bytes(answer)


def _answer(store: dist.Store, rank: int, world_size: int, timeout_s: float, job: bytes) -> bytes | _Failed:
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        function, args = pickle.loads(job)
        return pickle.dumps(function(*args))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return _Failed(None, text)
        return _Failed(error, text)


def _leave(store: dist.Store, rank: int, world_size: int) -> None:
    """Forget the job. No rank closes its connections while another may still read from them."""
    store.set(f"left/{rank}", "")
    with contextlib.suppress(dist.DistStoreError):
        store.wait([f"left/{r}" for r in range(world_size)], datetime.timedelta(seconds=GRACE_S))
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
