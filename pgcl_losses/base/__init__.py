"""What every module stands on: options and their checks, processes that agree, unit vectors.

Files here import nothing of the package outside this folder. Begin with `module`, the base class of
all losses.
"""
