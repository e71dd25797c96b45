"""Programs that made the tables of speed and memory: ``python -m benchmarks.scripts`` and others.

They need tqdm; `loop` and `nodes` PyG, and `plot` matplotlib as well.
"""
