"""False negatives: what an oracle without them gains, and what of it a user can have."""
