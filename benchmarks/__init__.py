"""Programs that made the tables of speed and memory: ``python -m benchmarks.run`` and others.

They need tqdm; `loop` and `nodes` PyG, and `plot` matplotlib as well.
"""
