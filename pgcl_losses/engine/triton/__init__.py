"""The engine for CUDA: fused kernels. It needs the package triton, so import it when asked for."""

from pgcl_losses.engine.triton.launch import gradient, log_sums

__all__ = ["gradient", "log_sums"]
