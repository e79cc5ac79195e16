"""Direct exchange over gloo: every pair of ranks sends and receives at once, sums are in rank order in fp32.

gloo's own collectives leave much of a link unused (20 MiB over 1 Gbit between two hosts, milliseconds, ideal 84: its
all_gather 138, its reduce_scatter 184; direct exchange 94 and 93). Data is received straight into its place. The sum
is ((c0 + c1) + c2) + ... over ranks, in fp32 or wider whatever the wire dtype, so results do not depend on timing.

A group numbers its exchanges; the number is the message tag, so two exchanges between the same pair never mix. All
ranks of a group issue the same exchanges in the same order: the schedule's communication skeleton.

A bucket's small shards are packed into one message a peer: what a message costs is mostly not its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.runtime.kernels import chunk_sum
from fxshard.runtime.world import Pending

_TAGS = 1 << 20


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a 1-D tensor: gloo does not send every dtype."""
    return tensor.view(torch.uint8)


class Exchange(Pending):
    """Sends and receives under way, and what to do when all have ended."""

    __slots__ = ("_finish", "_works")

    def __init__(self, works: list[dist.Work], finish: Callable[[], None] | None = None):
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if self._finish is not None:
            self._finish()
            self._finish = None


class TwoRounds(Pending):
    """A collective whose second round is posted by a helper thread, which gives what is then under way."""

    __slots__ = ("_posted",)

    def __init__(self, posted: Future[list[dist.Work]]):
        self._posted = posted

    def wait(self) -> None:
        for work in self._posted.result():
            work.wait()


class Helpers:
    """Threads that carry AllReduces on, one for each round."""

    def __init__(self) -> None:
        self.first = ThreadPoolExecutor(1, thread_name_prefix="fxshard-replicate")
        self.second = ThreadPoolExecutor(1, thread_name_prefix="fxshard-replicate")


class DirectGroup:
    """The ranks of one communicator; `index` is this process's place among them."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None, index: int):
        self.ranks, self.group, self.index = list(ranks), group, index
        # Each rank starts with its right neighbour, so no rank is everyone's first target.
        self.peers = [(index + step) % len(ranks) for step in range(1, len(ranks))]
        self._number = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _next(self) -> int:
        """The number of the next exchange."""
        tag = self._number
        self._number = (tag + 1) % _TAGS
        return tag

    def post(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        tag: int | None = None,
    ) -> list[dist.Work]:
        """Start the next exchange, or a part of exchange `tag`: places to receive into, then (peer index, bytes) to send.
        What is under way is in this order."""
        if tag is None:
            tag = self._next()
        works: list[dist.Work] = []
        for peer, place in receives:
            works.append(dist.irecv(place, self.ranks[peer], group=self.group, tag=tag))  # type: ignore[arg-type]
        for peer, data in sends:
            works.append(dist.isend(data, self.ranks[peer], group=self.group, tag=tag))  # type: ignore[arg-type]
        return works

    def bind_all_gather(self, shard: Tensor, full: Tensor) -> Callable[[], Pending]:
        """shard (S,) of each rank -> full (size * S,)."""
        if shard.numel() == 0:
            return Pending
        chunks = full.split(shard.numel())
        mine, data = chunks[self.index], raw(shard)
        sends = [(peer, data) for peer in self.peers]
        receives = [(peer, raw(chunks[peer])) for peer in reversed(self.peers)]

        def issue() -> Pending:
            works = self.post(sends, receives)
            mine.copy_(shard)
            return Exchange(works)

        return issue

    def bind_bucket(self, shards: Sequence[Tensor], fulls: Sequence[Tensor], staging: Tensor) -> Callable[[], Pending]:
        """shards (S_i,) of each rank -> fulls (size * S_i,), in one message a peer. staging: bytes (size * B,), B those of
        all shards: row r is what rank r sends, every member's shard after the other's. Each dtype is its own.
        """
        pairs = [(raw(shard), raw(full)) for shard, full in zip(shards, fulls, strict=True) if shard.numel()]
        if not pairs:
            return Pending
        sizes = [shard.numel() for shard, _ in pairs]
        rows = staging.view(self.size, sum(sizes))
        mine, parts = rows[self.index], [shard for shard, _ in pairs]
        out = [(full.view(self.size, -1), column) for (_, full), column in zip(pairs, rows.split(sizes, 1))]
        sends = [(peer, mine) for peer in self.peers]
        receives = [(peer, rows[peer]) for peer in reversed(self.peers)]

        def finish() -> None:
            for full, column in out:
                full.copy_(column)

        def issue() -> Pending:
            torch.cat(parts, out=mine)
            return Exchange(self.post(sends, receives), finish)

        return issue

    def bind_reduce_scatter(self, buffer: Tensor, out: Tensor, staging: Tensor) -> Callable[[], Pending]:
        """buffer (size * S,) -> out (S,), the sum in rank order. staging: ((size - 1) * S,) of buffer's dtype, or of one chunk
        less where `out` is of that dtype: the first peer's is received there."""
        if out.numel() == 0:
            return Pending
        chunks = buffer.split(out.numel())
        room = [out] if out.dtype == buffer.dtype else []
        room += staging.split(out.numel()) if staging.numel() else ()
        places = dict(zip(sorted(self.peers), room))
        ordered = [chunks[r] if r == self.index else places[r] for r in range(self.size)]
        sends = [(peer, raw(chunks[peer])) for peer in self.peers]
        receives = [(peer, raw(places[peer])) for peer in reversed(self.peers)]

        def finish() -> None:
            chunk_sum(ordered, out)

        return lambda: Exchange(self.post(sends, receives), finish)

    def bind_all_reduce(
        self,
        value: Tensor,
        staging: Tensor,
        helpers: Helpers,
        before: Callable[[], object] | None = None,
    ) -> Callable[[Pending | None], Pending]:
        """value (n,) -> its sum over the group, in place: each rank sums one part of it and sends the part back to all.

        staging: ((size - 1) * ceil(n / size),) of value's dtype. The first round is posted at once, or in `helpers.first` if
        `previous` is to be waited for and then `before` called; the second in `helpers.second`, when its sum is there. So
        the first round of the next AllReduce does not wait for the second of this one, nor either for the compute thread.
        """
        bounds = self._parts(value.numel())
        parts = [value[a:b] for a, b in bounds]
        mine = parts[self.index]
        places = {peer: staging[i * mine.numel() : (i + 1) * mine.numel()] for i, peer in enumerate(sorted(self.peers))}
        ordered = [mine if r == self.index else places[r] for r in range(self.size)]
        out_sends = [(p, raw(parts[p])) for p in self.peers if parts[p].numel()]
        out_receives = [(p, raw(places[p])) for p in reversed(self.peers)] if mine.numel() else []
        back_sends = [(p, raw(mine)) for p in self.peers] if mine.numel() else []
        # A part comes back only after its peer has had all of what it is made of: it may be received over what is being sent.
        back_receives = [(p, raw(parts[p])) for p in reversed(self.peers) if parts[p].numel()]

        def first(previous: Pending | None, out: int, back: int) -> tuple[list[dist.Work], list[dist.Work]]:
            """What the sum waits for, and the rest that is under way."""
            if previous is not None:
                previous.wait()
            if before is not None:
                before()
            later = self.post([], back_receives, back)
            works = self.post(out_sends, out_receives, out)
            return works[: len(out_receives)], works[len(out_receives) :] + later

        def second(received: list[dist.Work], later: list[dist.Work], back: int) -> list[dist.Work]:
            for work in received:
                work.wait()
            if mine.numel():
                chunk_sum(ordered, mine)
            return later + self.post(back_sends, [], back)

        def issue(previous: Pending | None) -> Pending:
            out, back = self._next(), self._next()
            if previous is None and before is None:
                return TwoRounds(helpers.second.submit(second, *first(None, out, back), back))
            started = helpers.first.submit(first, previous, out, back)
            return TwoRounds(helpers.second.submit(lambda: second(*started.result(), back)))

        return issue

    def _parts(self, numel: int) -> list[tuple[int, int]]:
        step = -(-numel // self.size)
        return [(min(i * step, numel), min((i + 1) * step, numel)) for i in range(self.size)]
