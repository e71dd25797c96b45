"""The loss of this package in the published scripts of GraphCL and SimGRACE."""
