"""Molecules: an encoder is pre-trained without labels, and fine-tuned or probed on properties."""

from .. import need

need("molecules", "rdkit")
