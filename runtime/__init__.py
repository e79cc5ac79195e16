"""The runtime: worlds, streams, memory, lowering and the executor."""

from fxshard.runtime.control import ControlPlane
from fxshard.runtime.distributed import GlooWorld, NcclWorld
from fxshard.runtime.executor import Executor, Program
from fxshard.runtime.storage import FlatStorage
from fxshard.runtime.virtual import VirtualWorld
from fxshard.runtime.world import World

__all__ = ["ControlPlane", "Executor", "FlatStorage", "GlooWorld", "NcclWorld", "Program", "VirtualWorld", "World"]
