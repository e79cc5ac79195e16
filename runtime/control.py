"""The control plane: short texts between all ranks through the store of the default process group.

No collective is entered, so a rank that fails can still say so and a rank that never comes is named.
"""

from __future__ import annotations

import datetime
import json

import torch.distributed as dist

from fxshard.capture import torch_private
from fxshard.errors import AgreementError

_FAILED = "FAILED "


class ControlPlane:
    """The ranks of the default process group. Every rank tells or exchanges on the same topics in the same order."""

    def __init__(self) -> None:
        self.rank, self.W = dist.get_rank(), dist.get_world_size()
        self.store = torch_private.default_store()

    def tell(self, topic: str, text: str) -> str:
        """Leave a text for the others without waiting for theirs; returns the key prefix of this round."""
        # Counted in the store, so that a second model does not read the first one's answers.
        prefix = f"fxshard/{topic}/{self.store.add(f'fxshard/{topic}/{self.rank}', 1)}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(text))
        return prefix

    def fail(self, topic: str, error: BaseException) -> None:
        """Tell the others that this rank will not come: what they `agree` on then fails, naming it and why."""
        self.tell(topic, f"{_FAILED}{type(error).__name__}: {error}")

    def agree(self, topic: str, text: str, timeout_s: float, what: str) -> None:
        """Compare a text with all other ranks'.

        Raises AgreementError, with `what` in front, if they differ or a rank failed; also if some do not come in time, and
        on those if they come after all.
        """
        prefix = self.tell(topic, text)
        keys = [f"{prefix}/{r}" for r in range(self.W)]
        try:
            self.store.wait(keys, datetime.timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            absent = tuple(r for r, key in enumerate(keys) if not self.store.check([key]))
            late = AgreementError(
                f"rank {self.rank} waited {timeout_s:g} s for rank{'s' if len(absent) > 1 else ''} "
                f"{', '.join(map(str, absent))} to compare '{topic}', in vain. Look at their output first"
            )
            late.absent = absent
            self.store.set(f"{prefix}/given up", str(self.rank))
            raise late from error
        if self.store.check([f"{prefix}/given up"]):
            other = self.store.get(f"{prefix}/given up").decode()
            raise AgreementError(
                f"rank {self.rank} came to compare '{topic}' when rank {other} had given up waiting for it"
            )
        texts = [json.loads(self.store.get(key)) for key in keys]
        for rank, other in enumerate(texts):
            if other.startswith(_FAILED):
                raise AgreementError(f"{what}: rank {rank} failed with {other.removeprefix(_FAILED)}")
        if (difference := _first_difference(texts)) is not None:
            raise AgreementError(f"{what}: {difference}")


def _first_difference(texts: list[str]) -> str | None:
    """Where the ranks' texts first part, or None."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            pairs = list(zip([*texts[0].split("\n"), "(end)"], [*text.split("\n"), "(end)"]))
            mine, other = next(((a, b) for a, b in pairs if a != b), pairs[-1])
            return f"rank 0 has '{mine.strip()}', rank {rank} has '{other.strip()}'"
    return None
