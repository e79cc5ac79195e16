"""The intermediate representation: units, FlatParameter layout, node kinds, phases, the schedule and its verifier.

Nothing here imports passes, runtime or viz; they all import this.
"""

from fxshard.ir.layout import FlatParameter, ParameterSpec
from fxshard.ir.nodes import NodeInfo, Slot
from fxshard.ir.phase import Phase
from fxshard.ir.schedule import Accumulation, Remark, Remarks, Schedule

__all__ = [
    "Accumulation",
    "FlatParameter",
    "NodeInfo",
    "ParameterSpec",
    "Phase",
    "Remark",
    "Remarks",
    "Schedule",
    "Slot",
]
