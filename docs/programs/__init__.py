"""Programs that write parts of the pages, such as ``python -m docs.programs.presets``."""
