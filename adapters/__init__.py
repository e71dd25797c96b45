"""Adapters to graph frameworks, one module each. The package itself imports no framework."""

if __name__ != "pgcl_losses.adapters":
    # Under a second name, each of its classes would exist twice.
    raise ImportError(
        f"this folder is installed as pgcl_losses.adapters, but was imported as {__name__}: "
        "install pgcl-losses, such as by pip install -e ., and import pgcl_losses.adapters"
    )
