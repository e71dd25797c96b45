"""Where PGCL helps and where it hurts, on planted classes."""
