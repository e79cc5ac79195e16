"""The intermediate representation: units, FlatParameter layout, node kinds, phases, the schedule and its verifier.

Nothing here imports passes, runtime or viz; they all import this.
"""

from fxshard.ir.layout import FlatParameter, ParameterSpec
from fxshard.ir.schedule import NodeInfo, Phase, Remark, Remarks, Schedule, Slot

__all__ = ["FlatParameter", "NodeInfo", "ParameterSpec", "Phase", "Remark", "Remarks", "Schedule", "Slot"]
