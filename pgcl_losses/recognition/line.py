"""A fit as a line of code and in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.presets import PRESETS, as_written
from pgcl_losses.recognition.candidates import OPTIONS
from pgcl_losses.recognition.fit import Fit, differences
from pgcl_losses.recognition.probe import Probe, labels_of

TINY = 1e-6  # the relative error of a gradient that no epsilon of a script exceeds


@dataclass(frozen=True)
class Recognized:
    """What `recognize` found. Print it, or use ``loss``, the ``InfoNCE`` to write in its place."""

    kind: str  # "exact", "nearly", "unit" (for embeddings of length 1) or "none"
    differences: tuple[str, ...]  # what the function does besides, or facts about it
    loss: InfoNCE | None = None  # the same loss, or the nearest one
    line: str = ""  # how the value is computed with it
    factor: float = math.nan
    constant: float = math.nan
    names: tuple[str, ...] = ()  # scripts that have this loss, for `InfoNCE.like`
    error: float = math.inf  # the largest relative error of the gradient, with the differences

    def is_even(self) -> bool:
        """Whether the line is one call, or a loss and a number."""
        return self.line.count("InfoNCE") == 1

    def __str__(self) -> str:
        agree = f"value and gradient agree to {self.error:.0e} on batches of 8 to 12 graphs"
        lines = [self.line] if self.kind != "none" else ["no loss of this package"]
        if self.names and self.is_even() and self.kind in ("exact", "unit"):
            lines.append(f'as in {", ".join(self.names)}: InfoNCE.like("{self.names[0]}")')
        if self.kind == "exact":
            lines.append(agree)
        elif self.kind == "unit":
            lines.append("equal for embeddings of length 1; what the function makes of lengths")
            lines[-1] += " cannot be seen"
        elif self.kind == "nearly":
            lines.append(f"nearly: with the following, {agree}")
        elif self.line:
            lines.append(f"nearest: {self.line}; its gradient is {self.error:.1%} off")
        return "\n".join([*lines, *(f"- {difference}" for difference in self.differences)])


@dataclass(frozen=True)
class Words:
    """Turns a fit into a line of code and words."""

    probes: list[Probe]
    labels: bool
    tolerance: float

    def tiny(self) -> float:
        """An error of the gradient that is taken for an epsilon; with labels none is fitted."""
        return 1e-3 if self.labels else TINY

    def of(self, fit: Fit) -> Recognized:
        """Say what was found."""
        constant, changes = self.constant(fit)
        options: dict[str, Any] = {"temperature": round_to(math.exp(fit.parameters[0]), fit.error)}
        options |= fit.candidate.options
        for name, number in zip(fit.candidate.fitted, fit.parameters[1:], strict=True):
            if name in OPTIONS and number > 1e-9:
                options[name] = round_to(number, fit.error)
        ways, power = fit.weights[:2].tolist(), fit.growth.power
        factor = sum(ways) or math.nan
        near = max(100 * self.tolerance, 10 * fit.error)
        shares = [x / factor if abs(x / factor) > near else 0.0 for x in ways]
        if len(shares) == 2 and abs(shares[0] - 0.5) <= near:
            factor, shares = (factor / 2 if power == 1 else factor), [1.0]
        elif len(shares) == 2:
            options["queries"] = "first"
        if power == 1:
            options["reduction"] = "sum"
        options = {name: options[name] for name in InfoNCE.options if name in options}
        if fit.growth.difference:
            changes.insert(0, fit.growth.difference)
        changes = [*differences(fit), *changes]
        kind = "nearly" if changes else "exact"
        return Recognized(
            kind if math.isfinite(constant) else "none",
            tuple(changes),
            InfoNCE(**options),
            self.line(options, [factor * x for x in shares], power, constant, fit.error),
            round_to(factor, fit.error),
            constant,
            _names(options, self.labels),
            fit.error,
        )

    def line(
        self,
        options: dict[str, Any],
        numbers: Sequence[float],
        power: float,
        constant: float,
        error: float,
    ) -> str:
        """Write the value as Python: a call for each direction, times a number each."""
        z1, z2 = (
            name if place in self.probes[0].learned else f"{name}.detach()"
            for place, name in enumerate(("z1", "z2"))
        )
        calls = ["(z, labels=labels)"] if self.labels else [f"({z1}, {z2})", f"({z2}, {z1})"]
        written = {1.0: "", -1.0: "-"}
        parts = [
            written.get(number, f"{number:.12g} * ") + f"InfoNCE({as_written(options)}){call}"
            for x, call in zip(numbers, calls, strict=False)  # one call, if both are equal
            if (number := round_to(x, error))
        ]
        line = " + ".join(parts)
        if power not in (0, 1):
            size = f"len({'z' if self.labels else 'z1'}) ** {power:g}"
            line = f"{size} * {line if len(parts) == 1 else f'({line})'}"
        return line + f" {'-' if constant < 0 else '+'} {abs(constant):.12g}" * (abs(constant) > 0)

    def constant(self, fit: Fit) -> tuple[float, list[str]]:
        """Find what the function adds to our value; NaN if it depends on the batch."""
        values = torch.tensor([x.value for x in self.probes], dtype=torch.float64)
        added, error = values - fit.values, fit.error if fit.error < self.tiny() else 0.0
        noise = 10 * max(self.tolerance, error) * max(1.0, float(values.abs().max()))
        changes: list[str] = []
        constant = float(added[0])
        if float(added.max() - added.min()) > noise:
            n = torch.tensor([len(x.views[0]) for x in self.probes]).double()
            views = 1 if fit.candidate.options.get("negatives") == "cross" else 2
            constant = math.nan
            known = {"log(number of graphs)": n.log()}
            known["log(number of negatives)"] = (views * (n - 1)).log()
            if self.labels:
                counts = [labels_of(len(x.views[0])).bincount() for x in self.probes]
                share = torch.stack([(x == 1).sum() for x in counts]) / n
                known = {"(the share of queries without a positive)": share.double()}
            for name, x in known.items():
                basis = torch.stack([x, torch.ones_like(n)], 1)
                line = torch.linalg.lstsq(basis, added).solution
                if float((basis @ line - added).abs().max()) <= noise:
                    constant = float(line[1])
                    changes = [f"it adds {line[0]:.4g} * {name} to the value"]
            if math.isnan(constant):
                return constant, ["its value depends on the batch"]
        return round_to(constant) if abs(constant) > noise else 0.0, changes


def round_to(number: float, error: float = 0.0) -> float:
    """Round to few digits, if the number is as near to them as it can be known."""
    near = min(max(1e-9, 10 * error), 1e-3) * abs(number)
    digits = (float(f"{number:.{n}g}") for n in range(1, 18))
    return next((x for x in digits if abs(x - number) <= near), number)


def _names(options: dict[str, Any], labels: bool) -> tuple[str, ...]:
    """The scripts whose loss has these options, at any temperature."""
    default = InfoNCE()

    def comparable(given: dict[str, Any]) -> dict[str, Any]:
        compared = [name for name in InfoNCE.options if name not in ("temperature", "reduction")]
        return {name: given.get(name, getattr(default, name)) for name in compared}

    wanted = comparable(options)
    return tuple(
        name
        for name, preset in PRESETS.items()
        if not preset.value
        and (", labels=" in preset.call if labels else preset.call.count(",") == 1)
        and ("=" in preset.call) == labels
        and comparable(preset.options) == wanted
    )
