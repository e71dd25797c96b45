"""Which loss of this package a function of a user's is.

`probe` calls the function on random batches. `fit` finds which of the `candidates` has the same
gradient. `line` writes a fit as code and in words, and `answer` decides what to say.
"""

from pgcl_losses.recognition.answer import recognize
from pgcl_losses.recognition.line import Recognized

__all__ = ["Recognized", "recognize"]
