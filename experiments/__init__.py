"""The programs that made the results: ``python -m experiments.unsupervised``, ``.map`` and others.

Rooms know the shelf, which holds what they share, and nothing of each other.
"""

import importlib.util


def need(extra: str, *modules: str) -> None:
    """An error that says how to install a module that is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"these experiments need {module}: in the checkout, pip install -e '.[{extra}]'",
                name=module,
            )


need("experiments", "matplotlib", "sklearn", "torch_geometric", "tqdm")
