"""Molecules: an encoder is pre-trained without labels, and fine-tuned on their properties."""
