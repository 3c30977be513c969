"""torchvision beside a CPU build of torch: its Python part imports, its operators do not exist.

torchvision is published for CUDA only. Beside a CPU build of torch its compiled operators do not
load, and its import ends at the first one that it describes for tracing; timm, peft and
transformers import it and end with it. None of them needs the operators here: declaring them lets
the rest be imported.
"""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec

import torch

_DECLARED: list[torch.library.Library] = []
_LOCK = threading.Lock()  # lanes may share a process


def import_torchvision() -> None:
    """Import torchvision, where it is installed; call it before transformers, timm or peft."""
    with _LOCK:
        if "torchvision" in sys.modules or find_spec("torchvision") is None:
            return
        try:
            import torchvision
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            # A copy: other threads import meanwhile.
            for name in [name for name in list(sys.modules) if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED.append(library)  # the operators last as long as the library
            import torchvision  # noqa: F401
