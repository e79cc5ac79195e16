"""What a pass is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a schedule, with a contract.

    `requires` must be established by earlier passes, `provides` is established by this one. Options are fields. A pass
    holds no state between runs and neither prints nor times: the manager does.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        """Edit `schedule` in place; say in `remarks` what was done and what could not be, and why."""
        raise NotImplementedError(f"pass '{self.name}' has no apply")

    def __str__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"{self.name}{{{options}}}" if options else self.name
