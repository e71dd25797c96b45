"""The losses of published scripts by name: one table, from which everything else is made.

``InfoNCE.like`` and ``InfoNCE.names`` read it, the tables of the guide (docs/swap.md) are written
from it, and the tests hold each entry to the formula of the script's code, value and gradient.
"""

import difflib
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """The options of ``InfoNCE`` that give the loss of a script, and how the loss is called."""

    options: dict[str, Any]  # with the script's own default temperature
    source: str  # Markdown: which function of the script it is, and what to know about it
    call: str = "(view1, view2)"
    # An expression of `loss_of`, an InfoNCE with these options, where the script's value is more
    # than one call: a factor, or a sum of several calls.
    value: str = ""

    def expression(self) -> str:
        """How the script's value is computed with ``loss_of``, an ``InfoNCE``."""
        return self.value or f"loss_of{self.call}"


def as_written(options: dict[str, Any]) -> str:
    """Options as they are written in a call."""
    return ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"
        for name, value in options.items()
    )


_CROSS = {"negatives": "cross"}
_FIRST = {"negatives": "cross", "queries": "first"}
_DOT = {"similarity": "dot"}
_SUM = {"over_positives": "sum"}
_MOCO = {"temperature": 0.07, "negatives": "memory", "queries": "first"}
_TABLE = "(z[rows], table, labels=(rows, arange(len(table))))"

# By the section of the guide, and by the name of the script.
GROUPS: dict[str, dict[str, Preset]] = {
    "Graphs": {
        "GraphCL": Preset(
            {"temperature": 0.2, **_FIRST, "decoupled": True},
            "`loss_cal`; also `loss_cl`, with `temperature=0.1` for molecules, and with 0.5 for "
            "semi-supervised training on TU sets and for adversarial robustness",
        ),
        "JOAO": Preset(
            {"temperature": 0.2, **_FIRST, "decoupled": True},
            "`loss_cal`; for molecules it is `loss_cl`, with `temperature=0.1`",
        ),
        "SimGRACE": Preset(
            {"temperature": 0.2, **_FIRST, "decoupled": True},
            "`loss_cal(x2, x1)`",
            "(view2, view1)",
        ),
        "AD-GCL": Preset(
            {"temperature": 0.2, **_CROSS, "decoupled": True},
            "`calc_loss`; with `sym=False` it is GraphCL's",
        ),
        "PyGCL": Preset(
            {"temperature": 0.2, **_CROSS},
            "`InfoNCE` in its GraphCL script; [all modes](#pygcl)",
        ),
        "DIG": Preset(
            {"temperature": 0.5, **_FIRST, "decoupled": True},
            "`NCE_loss` of its GraphCL; [more than two views](#dig); `norm=False`: also "
            '`similarity="dot"`',
        ),
        "ProG": Preset(
            {"temperature": 0.1, **_FIRST},
            "`loss_cl` of its GraphCL and SimGRACE, without the 1e-4 in its denominator; in the "
            "older "
            "folder `ProG/` also `decoupled=True`",
        ),
        "GPrompt": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "`Gprompt_tuning_loss` of ProG",
            "(embeddings, centers, labels=(labels, arange(len(centers))))",
        ),
        "SimCLR": Preset({"temperature": 0.07}, "NT-Xent: `info_nce_loss`"),
        "HCL": Preset(
            {"temperature": 0.5, "hardness": 1.0, "debias": 0.1},
            '`criterion` with `estimator="hard"`; `hardness` is beta, `debias` is tau_plus',
        ),
        "DCL": Preset(
            {"temperature": 0.1, "decoupled": True},
            "`DCL` (Yeh et al.: decoupled contrastive learning) in both directions, as `main.py` "
            'adds them; of one: `queries="first"`; the debiased loss is `DCL-debiased`',
            value="2 * loss_of(view1, view2)",
        ),
        "DCL-debiased": Preset(
            {"temperature": 0.5, "debias": 0.1},
            "`train` of chingyaoc/DCL, debiased contrastive learning (Chuang et al.); `debias` is "
            "`tau_plus`",
        ),
        "GCC": Preset({"temperature": 0.07, **_FIRST}, "without `--moco`", "(feat_k, feat_q)"),
        "GCC-MoCo": Preset(
            {**_MOCO, "memory_size": 16384},
            "with `--moco --nce-k 16384`, once the memory is full; give [`dim`, and "
            "`remember(feat_k)`]"
            "(#moco-gcc)",
            "(feat_q, feat_k)",
        ),
        "MoCo": Preset(
            {**_MOCO, "memory_size": 65536},
            "once the memory is full; give [`dim`, and `remember(k)`]"
            "(losses.md#a-momentum-encoder)",
            "(q, k)",
        ),
    },
    "Molecules": {
        "MolCLR": Preset(
            {"temperature": 0.1}, "`NTXentLoss`, also without `use_cosine_similarity`"
        ),
        "3DInfomax": Preset(
            {"temperature": 0.1, **_FIRST, "decoupled": True},
            '`NTXent`; `norm=False`: also `similarity="dot"`',
            "(z2d, z3d)",
        ),
        "3DInfomax-conformers": Preset(
            {"temperature": 0.1, **_FIRST, "decoupled": True, **_SUM},
            "`NTXentMultiplePositives`, C conformers of each molecule",
            "(z2d, z3d, labels=(arange(N), arange(N).repeat_interleave(C)))",
        ),
        "GraphMVP": Preset(
            {"temperature": 0.1, **_CROSS},
            '`dual_CL` with `--normalize`; without: also `similarity="dot"`',
        ),
        "CLOOME": Preset(
            {"temperature": 1 / 14.3, **_FIRST, "decoupled": True},
            "`cloob`, whose loss is InfoLOOB",
            value="loss_of.temperature * (loss_of(p_xx, p_xy) + loss_of(p_yy, p_yx))",
        ),
        "GraphLoG": Preset(
            {"temperature": 0.04, **_FIRST},
            "`inter_NCE_loss`, without the 1e-6 in its denominator",
            "(modified, graphs)",
        ),
        "GraphLoG-nodes": Preset(
            {"temperature": 0.04, **_FIRST, **_SUM},
            "`intra_NCE_loss`, without the 1e-6 in its denominator: masked nodes of the same "
            "graph are positives, its other nodes are "
            "negatives; both are positions, `(i, M + j)`, for M masked nodes",
            "(modified[masked], nodes, positives=same_masked, negative_pairs=same_others)",
        ),
    },
    "Nodes": {
        "GRACE": Preset(
            {"temperature": 0.5},
            '`loss`, after the projection; `mean=False`: half of `reduction="sum"`; the script\'s '
            "config.yaml has a temperature for each set, 0.4 for Cora",
        ),
        "GCA": Preset({"temperature": 0.4}, "as GRACE"),
        "HeCo": Preset(
            {"temperature": 0.8, **_CROSS, **_SUM},
            "`Contrast` with `lam=0.5`, after the projections; `positives` are `(i, N + j)` and "
            '`(N + i, j)` of `pos`; another `lam`: weight the halves of `reduction="none"`; 0.8 '
            "is for ACM",
            "(z_mp, z_sc, positives=pairs)",
        ),
        "TriCL": Preset(
            {"temperature": 0.5, **_CROSS},
            '`node_level_loss` and `group_level_loss`; `mean=False`: half of `reduction="sum"`',
        ),
        "MAGI": Preset(
            {"temperature": 0.5, **_DOT, "over_positives": "supcon"},
            "`Loss`; the pairs are the row and column of `mask` without its [diagonal](#nodes); "
            "train_gcn.py has `temperature=0.3`",
            value="loss_of.temperature * loss_of(z, positives=pairs)",
        ),
    },
    "Recommendation": {
        "SELFRec": Preset(
            {"temperature": 0.2, **_FIRST},
            "`InfoNCE` of SGL, SimGCL and XSimGCL (0.15 in its config); `b_cos=False`: also "
            '`similarity="dot"`; RLMRec\'s `ssl_con_loss` without its 1e-8',
        ),
        "SSLRec": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "`cal_infonce_loss`, for users or for items; 0.1 is for SimGCL, 0.2 for SGL and "
            "KGCL; also "
            "RLMRec's",
            _TABLE,
        ),
        "NCL": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "`ssl_layer_loss`; 1e-7 is its `ssl_reg` for ml-1m; for Yelp it is 1e-6, with "
            "`temperature=0.05`",
            value="1e-7 * (loss_of(u[rows], users, labels=(rows, arange(len(users)))) + alpha * "
            "loss_of(i[cols], items, labels=(cols, arange(len(items)))))",
        ),
        "NCL-ProtoNCE": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "`ProtoNCE_loss` for users or for items, before its weight `proto_reg`",
            "(z[rows], centroids, labels=(clusters[rows], arange(len(centroids))))",
        ),
        "LightGCL": Preset(
            {"temperature": 0.2, **_DOT, **_FIRST},
            "for users and for items, where no positive's score / tau is beyond the script's clamp "
            "to -5 and 5",
            _TABLE,
        ),
    },
    "Graphs and texts, knowledge graphs": {
        "CLIP": Preset(
            {"temperature": 0.07, **_CROSS},
            "also GraphCLIP; give a [learned temperature](losses.md#a-learned-temperature)",
            "(images, texts)",
        ),
        "GraphGPT": Preset(
            {"temperature": 0.07, **_CROSS}, "`cal_cl_loss` of its grounding, for each pair"
        ),
        "MoleculeSTM": Preset(
            {"temperature": 0.1, **_CROSS},
            '`do_CL` with `--SSL_loss=InfoNCE`; `--no_normalize`: also `similarity="dot"`',
        ),
        "SimKGC": Preset(
            {"temperature": 0.05, **_CROSS},
            "without its margin and self-negatives; pairs are `(i, N + j)` and `(N + j, i)` of "
            "`~triplet_mask`",
            value="2 * loss_of(hr, tail, labels=arange(N), positives=pairs, "
            "positive_weights=zeros(len(pairs[0])))",
        ),
    },
    "Labels, sentences, prototypes": {
        "SupCon": Preset(
            {"temperature": 0.1, "over_positives": "supcon"},
            "pytorch-metric-learning's `SupConLoss`, which is 0 for a batch of one class",
            "(z, labels=labels)",
        ),
        "SupContrast": Preset(
            {"temperature": 0.07, "over_positives": "supcon"},
            '`SupConLoss` with its `base_temperature`; `contrast_mode="one"`: also '
            '`queries="first"`; GraphCLIP\'s `sup_loss`',
            value="loss_of.temperature / 0.07 * loss_of(view1, view2, labels=labels)",
        ),
        "NTXentLoss": Preset(
            {"temperature": 0.07, "reduction": "none"},
            "pytorch-metric-learning's, a mean over all pairs; `counts` are the positives of each "
            "embedding",
            value="(loss_of(z, labels=labels) * counts).sum() / counts.sum()",
        ),
        "sentence-transformers": Preset(
            {"temperature": 0.05, **_FIRST},
            "`MultipleNegativesRankingLoss`, `temperature` is 1 / `scale`; with hard negatives "
            "`(anchors, cat([positives, negatives]), labels=(arange(N), arange(2 * N)))`; "
            'symmetric per direction: `queries="all"`',
            "(anchors, positives)",
        ),
        "info-nce-pytorch": Preset(
            {"temperature": 0.1, **_FIRST},
            "without `negative_keys`; paired ones are [listed negatives]"
            "(#links-with-sampled-negatives)",
            "(query, positive_key)",
        ),
        "PCL": Preset(
            {"temperature": 1.0, **_DOT, **_FIRST},
            "ProtoNCE of one clustering; of several, `main_pcl.py` takes the mean; `ids` are the "
            "clusters of the batch, then the sampled ones",
            "(normalize(q), prototypes[ids] / density[ids, None], "
            "labels=(arange(len(q)), arange(len(ids))))",
        ),
    },
    "Clusters": {
        "X-GOAL": Preset(
            {"temperature": 1.0, "queries": "first"},
            "`info_nce`; `pairs` are `(i, 2 * N + i)`; its `node_alignment` is the mean of "
            "`(h_list[i], h_list[j], h_list_neg[i])` over pairs of layers",
            "(h_org, h_pos, h_neg, labels=(arange(N), arange(N), N + arange(N)), "
            "negative_pairs=pairs)",
        ),
        "Contrastive-Clustering": Preset({"temperature": 0.5}, "`InstanceLoss`", "(z_i, z_j)"),
        "Contrastive-Clustering-clusters": Preset(
            {"temperature": 1.0, "gather": False},
            "`ClusterLoss` before its [entropy](#clusters); `AGCLoss` of Graph Contrastive "
            'Clustering: also `negatives="cross", queries="first"`',
            "(c_i.T, c_j.T)",
        ),
    },
}
PRESETS = {name: preset for group in GROUPS.values() for name, preset in group.items()}


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_preset(name: str) -> tuple[str, Preset]:
    """Find a preset by its name, in which case, hyphens and spaces do not matter.

    The error for an unknown name hints at presets whose `source` mentions it, as SELFRec's mentions
    SimGCL, or whose names are similar.
    """
    by_key = {_key(each): each for each in PRESETS}
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a script, but got {name!r}")
    if _key(name) not in by_key:
        near = [each for each, preset in PRESETS.items() if name.lower() in preset.source.lower()]
        near += [by_key[key] for key in difflib.get_close_matches(_key(name), by_key)]
        near = list(dict.fromkeys(near))[:5]
        hint = f"did you mean {' or '.join(near)}?" if near else f"names are {', '.join(PRESETS)}."
        more = "recognize(your_loss) says which loss a function is"
        raise ValueError(f"there is no script {name!r}: {hint} {more}")
    found = by_key[_key(name)]
    return found, PRESETS[found]
