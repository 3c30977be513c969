"""The flow language: what the user writes. Standard library only."""

from m2flow.flow.batch import Batch, Ragged
from m2flow.flow.flow import Flow
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode, WeightEdge
from m2flow.flow.loop import loop
from m2flow.flow.stage import BoundStage, Stage, StageSpec, stage
from m2flow.flow.trace import LoopSpec, Stream
from m2flow.flow.worker import ONE_LANE, Gang, Isolation, Layout, Place, Worker

__all__ = [
    "ONE_LANE",
    "SOURCE",
    "Batch",
    "BoundStage",
    "Flow",
    "FlowGraph",
    "Gang",
    "Isolation",
    "Layout",
    "LoopSpec",
    "Place",
    "Ragged",
    "Stage",
    "StageNode",
    "StageSpec",
    "Stream",
    "WeightEdge",
    "Worker",
    "loop",
    "stage",
]
