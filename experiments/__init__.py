"""The programs that made the results: ``python -m experiments.digits``, ``.unsupervised``, ...

Each folder imports from `experiments.common`, and not from the other folders.
"""

import importlib.util

for module in ("matplotlib", "rdkit", "sklearn", "torch_geometric", "tqdm"):
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"the experiments need {module}: in the checkout, pip install -e '.[experiments]'",
            name=module,
        )
