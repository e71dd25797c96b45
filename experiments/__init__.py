"""The programs that made the results: ``python -m experiments.digits``, ``.unsupervised``, ...

Each folder imports from `experiments.common`, and not from the other folders.
"""

import importlib.util


def need(extra: str, *modules: str) -> None:
    """Raise an error that says how to install a missing module."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"these experiments need {module}: in the checkout, pip install -e '.[{extra}]'",
                name=module,
            )


need("experiments", "matplotlib", "sklearn", "torch_geometric", "tqdm")
