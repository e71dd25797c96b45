"""What the experiments share: values of options, finished runs, rows of the ablation, tables."""
