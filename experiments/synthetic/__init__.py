"""Where PGCL helps and where it hurts, on synthetic clusters."""
