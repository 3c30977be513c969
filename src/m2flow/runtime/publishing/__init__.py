"""Publishing on lanes: who decides how weights travel, who lays them out, and who takes them over.

What is sent, and what it costs, is `m2flow.runtime.weights`; how bytes travel, the links below.
"""
