"""Adapters to graph frameworks, one module each; nothing here imports a framework by itself."""
