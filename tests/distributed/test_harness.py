"""The harness: results by rank, tracebacks of ranks, time-outs, and processes used again."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import RankFailure, Ranks, run


def total(scale: int) -> tuple[int, float, int, int]:
    value = torch.tensor([float(scale * (dist.get_rank() + 1))])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), os.getpid(), torch.get_num_threads()


def fail_on(rank: int, kind: str) -> None:
    """Rank `rank` fails while the others wait for it."""
    if dist.get_rank() == rank:
        if kind == "raise":
            raise ValueError(f"no luck on rank {rank}")
        if kind == "exit":
            os._exit(3)
        time.sleep(600)
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def test_results_come_by_rank_from_processes_of_one_thread() -> None:
    results = run(3, total, 10)
    assert [r[0] for r in results] == [0, 1, 2]
    assert {r[1] for r in results} == {60.0}
    assert len({r[2] for r in results} | {os.getpid()}) == 4
    assert {r[3] for r in results} == {1}


def test_processes_are_used_again_by_worlds_of_any_size(ranks: Ranks) -> None:
    first = [r[2] for r in ranks.run(2, total, 1)]
    larger = ranks.run(3, total, 2)
    assert [r[2] for r in larger][:2] == first
    assert {r[1] for r in larger} == {12.0}
    assert [r[:2] for r in ranks.run(1, total, 5)] == [(0, 5.0)]


def test_the_traceback_of_the_rank_that_failed_is_raised_and_the_others_end(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"in fail_on[^$]*no luck on rank 1") as caught:
        ranks.run(2, fail_on, 1, "raise")
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert {r[1] for r in ranks.run(2, total, 1)} == {3.0}


def test_a_failure_of_every_rank_is_told_of_each_and_ends_nobody(ranks: Ranks) -> None:
    before = [r[2] for r in ranks.run(2, total, 1)]
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, fail_everywhere)
    assert {rank: f"KeyError: 'rank {rank}'" in text for rank, text in caught.value.texts.items()} == {0: True, 1: True}
    assert [r[2] for r in ranks.run(2, total, 1)] == before


def test_a_process_that_dies_is_told_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="exit code 3"):
        run(2, fail_on, 0, "exit")


def test_ranks_that_do_not_answer_in_time_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not end within 3 s"):
        run(2, fail_on, 1, "sleep", timeout_s=3.0)
