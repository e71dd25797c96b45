"""The programs that made the results: ``python -m experiments.digits``, ``.few_labels``, ...

Each folder imports from `experiments.common`, and not from the other folders.
"""

import importlib.util


def require(*modules: str, command: str = "pip install -r requirements.txt") -> None:
    """An error with the command that installs it, if one of the modules is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"this program needs {module}: in the checkout, {command}", name=module
            )


require("matplotlib", "scipy", "sklearn", "torch_geometric", "tqdm")
