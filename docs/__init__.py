"""The pages, and the programs that write their tables and pictures."""
