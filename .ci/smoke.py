"""A user's first minute with the installed wheel; torch and numpy are all there is."""

import importlib
import importlib.resources
import importlib.util
import pkgutil
from pathlib import Path

import torch

import pgcl_losses
import pgcl_losses.adapters

assert "site-packages" in pgcl_losses.__file__, pgcl_losses.__file__
for absent in ("torch_geometric", "dgl", "GCL", "sklearn", "tqdm", "scipy", "pytest"):
    assert importlib.util.find_spec(absent) is None, f"{absent} is installed"
installed = {path.name for path in Path(pgcl_losses.__file__).parents[1].iterdir()}
assert not installed & {"adapters", "tests", "examples", "experiments", "benchmarks"}, installed
assert importlib.resources.files(pgcl_losses).joinpath("py.typed").is_file()

ALONE = ("pgcl_losses.adapters.", "pgcl_losses.pairs.fused")  # they need a framework, or Triton
for module in pkgutil.walk_packages(pgcl_losses.__path__, "pgcl_losses."):
    if not module.name.startswith(ALONE):
        importlib.import_module(module.name)

encoder = torch.nn.Linear(32, 96)
pgcl = pgcl_losses.PGCLLoss(dim=96)
optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=1e-2)
x = torch.randn(64, 32)
for _ in range(5):
    terms = pgcl.terms(encoder(x), encoder(x + 0.1 * torch.randn_like(x)))
    optimizer.zero_grad()
    terms.loss.backward()
    optimizer.step()
assert terms.loss.isfinite()
print(pgcl_losses.__version__, pgcl_losses.diagnostics(terms, pgcl.prototypes.weight))
