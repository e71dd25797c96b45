"""Adapters to graph frameworks, one module each. The package itself imports no framework."""
