"""Programs that made the tables of speed and memory: ``python -m benchmarks.run`` and others."""
