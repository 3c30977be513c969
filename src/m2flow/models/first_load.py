"""What the first load of a model in a process does once, done on import.

For the process of which lanes are forks: none of them has to do it again.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("")  # compiles the patterns of all architectures, and keeps them
