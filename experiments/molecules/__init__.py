"""Molecules: pre-train an encoder without labels, then fine-tune or probe it on properties."""

from experiments import require

require("rdkit", command="pip install -r requirements.txt rdkit")
