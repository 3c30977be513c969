"""Models: causal language models through transformers, and tokenizers that need no download."""

import os

# A bar for every file of a model is noise on the terminals of a dozen lanes.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
