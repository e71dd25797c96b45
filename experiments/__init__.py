"""The programs that made the results: ``python -m experiments.digits``, ``.few_labels``, ...

Each folder imports from `experiments.common`, and not from the other folders.
"""

import importlib.util


def require(*modules: str, extra: str = "experiments") -> None:
    """An error that names the extra, if one of the modules is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"this program needs {module}: in the checkout, pip install -e '.[{extra}]'",
                name=module,
            )


require("matplotlib", "sklearn", "torch_geometric", "tqdm")
