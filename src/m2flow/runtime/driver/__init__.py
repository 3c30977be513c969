"""The launcher's side: drivers of the engine, the pool of lanes, launching and re-planning."""
