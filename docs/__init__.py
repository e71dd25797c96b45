"""The pages of the site; `docs.programs` writes their tables and pictures."""
