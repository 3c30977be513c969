"""What a person sees of a run: its directory, timeline, report, progress and loggers.

Everything here reads and writes plain files or the terminal. Nothing here may know torch, Ray or
any workload: a run of language models and one of robots differ in their keys alone.

`run_directory` owns the files, `timeline` records the spans of lanes, `report` writes the HTML
page, `progress` the terminal, `loggers` where metrics go besides.
"""
