"""What the experiments share: command-line values, records of runs, losses, probes, tables."""
