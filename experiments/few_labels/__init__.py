"""Few labels on two sets of graphs with many classes: PGCL and InfoNCE over temperatures."""
