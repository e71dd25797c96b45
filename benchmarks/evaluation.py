"""Measure one kernel matrix for all folds and penalties against refitting from the vectors.

Both find the same accuracy of a support vector machine on the same Gaussian clusters.

python -m benchmarks.evaluation
python -m benchmarks.evaluation --rounds 1 --sizes 60 --output /tmp/evaluation.json
"""

from typing import Any

import numpy as np
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import scale
from sklearn.svm import SVC

from experiments.common.arguments import at_least
from experiments.unsupervised import evaluate

from . import measure

DIM = 96
REFIT = "refitting from the vectors"


def clusters(num: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings ``[num, 96]`` of classes that overlap, and their labels."""
    random = np.random.default_rng(0)
    labels = np.arange(num) % classes
    return 0.3 * random.normal(size=(classes, DIM))[labels] + random.normal(size=(num, DIM)), labels


def refitted(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """The accuracy, by machines that compute their kernels themselves."""
    rows = scale(embeddings)
    scores = []
    for train, test in StratifiedKFold(10, shuffle=True, random_state=seed).split(rows, labels):
        svm = SVC(gamma=1 / DIM, cache_size=1000)
        search = GridSearchCV(svm, {"C": evaluate.PENALTIES}, cv=5).fit(rows[train], labels[train])
        scores.append(search.score(rows[test], labels[test]))
    return 100 * float(np.mean(scores))


def cell(num: int, rounds: int) -> list[dict[str, Any]]:
    given = *clusters(num), 0
    one, other = evaluate.accuracy(*given), refitted(*given)
    if abs(one - other) > 1e-9:
        raise AssertionError(f"{num} graphs: accuracy {one} of one kernel, {other} of refitting")
    times = {"one kernel": lambda: evaluate.accuracy(*given), REFIT: lambda: refitted(*given)}
    timed = measure.time_in_turn(times, rounds, seconds=30)
    return measure.rows("evaluation", f"N={num} D={DIM}", "10 folds, 7 C", timed, REFIT)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=7, cpu_alone=True)
    about = "graphs, for 10 folds of both classes"
    parser.add_argument(
        "--sizes", type=at_least(20), help=about, nargs="+", default=[188, 344, 800]
    )
    args = parser.parse_args()
    measure.report(args, (cell(num, args.rounds) for num in args.sizes))
