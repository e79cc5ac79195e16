"""What a pass is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fxshard.ir import Remarks, Schedule


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a schedule, with a contract.

    `requires` must be established by earlier passes, `provides` is established by this one. Options are fields, and print
    and parse as `name{option=value}`. A pass holds no state between runs and neither prints nor times: the manager does.
    """

    name: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    strict: ClassVar[bool] = False
    """Whether what it missed is an error, which lists all of it."""

    def apply(self, schedule: Schedule, remarks: Remarks) -> None:
        """Edit `schedule` in place; say in `remarks` what was done and what could not be, and why."""
        raise NotImplementedError(f"pass '{self.name}' has no apply")

    def ensures(self, schedule: Schedule) -> Iterable[str]:
        """What this pass promised and `schedule`, which the verifier has passed, does not keep; nothing if all is well."""
        return ()

    def options_text(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        return f"{{{options}}}" if options else ""

    def __str__(self) -> str:
        return f"{self.name}{self.options_text()}"
