"""Imports torchvision in the way that works beside a CPU build of torch, before transformers do."""

from m2flow.models.policies.torchvision_import import import_torchvision

import_torchvision()
