"""Programs that made the tables of speed and memory: ``python -m benchmarks.run`` and others.

They need tqdm; `loop` and `grace` PyG, `grace` scikit-learn and `plot` matplotlib as well.
"""
