"""What the experiments share: finished runs, rows of the ablation, cells of tables."""
