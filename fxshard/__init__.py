"""fxshard: PyTorch FSDP as a compiler. Communication is nodes of a graph, ordered by passes, run on streams.

model = fxshard.compile(model, F=4)
loss = model(batch); loss.backward(); optimizer.step()
print(model.schedule)
"""

from fxshard.api import compile, trace
from fxshard.deferred import deferred_init
from fxshard.errors import AgreementError, CaptureError, FxshardError, PassError, ScheduleError
from fxshard.gathered import gathered
from fxshard.ir import FlatParameter, Phase, Schedule
from fxshard.ir.diff import ScheduleDiff, diff
from fxshard.module import ShardedModule, is_compiled
from fxshard.options import MixedPrecision, Options
from fxshard.parameter import ShardedParameter
from fxshard.runtime import VirtualWorld
from fxshard.units import BytesOfFirstUse
from fxshard.viz import draw_notebook, render, render_diff

Schedule.renderer = staticmethod(render)
Schedule.displayer = staticmethod(draw_notebook)
ScheduleDiff.renderer = staticmethod(render_diff)

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BytesOfFirstUse",
    "CaptureError",
    "FlatParameter",
    "FxshardError",
    "MixedPrecision",
    "Options",
    "PassError",
    "Phase",
    "Schedule",
    "ScheduleDiff",
    "ScheduleError",
    "ShardedModule",
    "ShardedParameter",
    "VirtualWorld",
    "compile",
    "deferred_init",
    "diff",
    "gathered",
    "is_compiled",
    "trace",
]
