"""Molecules: pre-train an encoder without labels, then fine-tune or probe it on properties."""
