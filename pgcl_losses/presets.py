"""The losses of published scripts by name: one table, from which everything else is made.

``InfoNCE.like`` and ``InfoNCE.names`` read it, the tables of docs/catalogue.md are written
from it, and the tests hold each entry to the formula of the script's code, value and gradient.
"""

import difflib
from typing import Any, NamedTuple


class Preset(NamedTuple):
    """The options of ``InfoNCE`` that give the loss of a script, and how the loss is called."""

    options: dict[str, Any]  # with the script's own default temperature
    where: str  # "owner/repository path function"
    note: str = ""  # Markdown: what to know about it
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
            "Shen-Lab/GraphCL unsupervised_TU/gsimclr.py loss_cal",
            "`loss_cl` has 0.1 for molecules, 0.5 in the other folders",
        ),
        "JOAO": Preset(
            {"temperature": 0.2, **_FIRST, "decoupled": True},
            "Shen-Lab/GraphCL_Automated unsupervised_TU/joao.py loss_cal",
            "`loss_cl` for molecules has 0.1",
        ),
        "SimGRACE": Preset(
            {"temperature": 0.2, **_FIRST, "decoupled": True},
            "junxia97/SimGRACE unsupervised_TU/simgrace.py loss_cal",
            "view 2 is of the encoder with noise; `loss_cl` has 0.1 for molecules, 0.5 in "
            "the other folders",
            "(view2, view1)",
        ),
        "AD-GCL": Preset(
            {"temperature": 0.2, **_CROSS, "decoupled": True},
            "susheels/adgcl unsupervised/learning/ginfominmax.py calc_loss",
            "with `sym=False` it is GraphCL's",
        ),
        "PyGCL": Preset(
            {"temperature": 0.2, **_CROSS},
            "PyGCL/PyGCL GCL/losses/infonce.py InfoNCE",
            "as in its GraphCL script; [all modes](coming_from.md#pygcl)",
        ),
        "DIG": Preset(
            {"temperature": 0.5, **_FIRST, "decoupled": True},
            "divelab/DIG dig/sslgraph/method/contrastive/objectives/infonce.py NCE_loss",
            "[more than two views, `norm=False`, GRACE](coming_from.md#dig)",
        ),
        "ProG": Preset(
            {"temperature": 0.1, **_FIRST},
            "sheldonresearch/ProG prompt_graph/pretrain/GraphCL.py loss_cl",
            "also SimGRACE; without its 1e-4; in the older folder `ProG/`: `decoupled=True`",
        ),
        "GPrompt": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "sheldonresearch/ProG prompt_graph/utils/loss.py Gprompt_tuning_loss",
            call="(embeddings, centers, labels=(labels, arange(len(centers))))",
        ),
        "SimCLR": Preset(
            {"temperature": 0.07}, "sthalles/SimCLR simclr.py info_nce_loss", "NT-Xent"
        ),
        "HCL": Preset(
            {"temperature": 0.5, "hardness": 1.0, "debias": 0.1},
            "joshr17/HCL image/main.py criterion",
            "`hardness` is beta, `debias` is tau_plus; its graph folder has a JSD loss",
        ),
        "DCL": Preset(
            {"temperature": 0.1, "decoupled": True},
            "raminnakhli/Decoupled-Contrastive-Learning loss/dcl.py DCL",
            "Yeh et al., both directions, as `main.py` adds them",
            value="2 * loss_of(view1, view2)",
        ),
        "DCL-debiased": Preset(
            {"temperature": 0.5, "debias": 0.1},
            "chingyaoc/DCL main.py train",
            "Chuang et al.; `debias` is `tau_plus`",
        ),
        "GCC": Preset(
            {"temperature": 0.07, **_FIRST},
            "THUDM/GCC gcc/contrastive/criterions.py NCESoftmaxLossNS",
            "without `--moco`",
            "(feat_k, feat_q)",
        ),
        "GCC-MoCo": Preset(
            {**_MOCO, "memory_size": 16384},
            "THUDM/GCC gcc/contrastive/memory_moco.py MemoryMoCo",
            "once the memory is full; give [`dim`, and `remember(feat_k)`](swap.md#moco-gcc)",
            "(feat_q, feat_k)",
        ),
        "MoCo": Preset(
            {**_MOCO, "memory_size": 65536},
            "facebookresearch/moco moco/builder.py MoCo",
            "once the memory is full; give [`dim`, `remember(k)`](losses.md#a-momentum-encoder)",
            "(q, k)",
        ),
    },
    "Molecules": {
        "MolCLR": Preset(
            {"temperature": 0.1},
            "yuyangw/MolCLR utils/nt_xent.py NTXentLoss",
            "also without `use_cosine_similarity`",
        ),
        "3DInfomax": Preset(
            {"temperature": 0.1, **_FIRST, "decoupled": True},
            "HannesStark/3DInfomax commons/losses.py NTXent",
            '`norm=False`: also `similarity="dot"`',
            "(z2d, z3d)",
        ),
        "3DInfomax-conformers": Preset(
            {"temperature": 0.1, **_FIRST, "decoupled": True, **_SUM},
            "HannesStark/3DInfomax commons/losses.py NTXentMultiplePositives",
            "C conformers of each molecule",
            "(z2d, z3d, labels=(arange(N), arange(N).repeat_interleave(C)))",
        ),
        "GraphMVP": Preset(
            {"temperature": 0.1, **_CROSS},
            "chao1224/GraphMVP src_classification/util.py dual_CL",
            'with `--normalize`; without: also `similarity="dot"`',
        ),
        "CLOOME": Preset(
            {"temperature": 1 / 14.3, **_FIRST, "decoupled": True},
            "ml-jku/cloome src/training/methods.py cloob",
            "its loss is InfoLOOB",
            value="loss_of.temperature * (loss_of(p_xx, p_xy) + loss_of(p_yy, p_yx))",
        ),
        "GraphLoG": Preset(
            {"temperature": 0.04, **_FIRST},
            "DeepGraphLearning/GraphLoG pretrain_graphlog.py inter_NCE_loss",
            "without its 1e-6",
            "(modified, graphs)",
        ),
        "GraphLoG-nodes": Preset(
            {"temperature": 0.04, **_FIRST, **_SUM},
            "DeepGraphLearning/GraphLoG pretrain_graphlog.py intra_NCE_loss",
            "without its 1e-6; [which pairs](swap.md#molecules)",
            "(modified[masked], nodes, positives=same_masked, negative_pairs=same_others)",
        ),
    },
    "Nodes": {
        "GRACE": Preset(
            {"temperature": 0.5},
            "CRIPAC-DIG/GRACE model.py loss",
            "after the projection, with any `batch_size`; config.yaml: 0.4 for Cora; `mean=False`: "
            '`reduction="sum"` / 2',
        ),
        "GCA": Preset({"temperature": 0.4}, "CRIPAC-DIG/GCA pGRACE/model.py loss", "as GRACE"),
        "HeCo": Preset(
            {"temperature": 0.8, **_CROSS, **_SUM},
            "liun-online/HeCo code/module/contrast.py Contrast",
            "0.8 is for ACM; after the projections, [`lam=0.5`; the pairs](swap.md#nodes)",
            "(z_mp, z_sc, positives=pairs)",
        ),
        "TriCL": Preset(
            {"temperature": 0.5, **_CROSS},
            "wooner49/TriCL TriCL/models.py node_level_loss",
            'and `group_level_loss`; `mean=False`: half of `reduction="sum"`',
        ),
        "MAGI": Preset(
            {"temperature": 0.5, **_DOT, "over_positives": "supcon"},
            "EdisonLeeeee/MAGI magi/loss.py Loss",
            "[the pairs](swap.md#nodes); train_gcn.py has 0.3",
            value="loss_of.temperature * loss_of(z, positives=pairs)",
        ),
    },
    "Recommendation": {
        "SELFRec": Preset(
            {"temperature": 0.2, **_FIRST},
            "Coder-Yu/SELFRec util/loss_torch.py InfoNCE",
            'SGL, SimGCL, XSimGCL (0.15); `b_cos=False`: also `similarity="dot"`',
        ),
        "SSLRec": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "HKUDS/SSLRec models/loss_utils.py cal_infonce_loss",
            "`(z[rows], table[rows], table)` of the script; 0.1 is for SimGCL, 0.2 for SGL, KGCL",
            _TABLE,
        ),
        "NCL": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "RUCAIBox/NCL ncl.py ssl_layer_loss",
            "1e-7 is its `ssl_reg` for ml-1m; for Yelp it is 1e-6, with `temperature=0.05`",
            value="1e-7 * (loss_of(u[rows], users, labels=(rows, arange(len(users)))) + alpha * "
            "loss_of(i[cols], items, labels=(cols, arange(len(items)))))",
        ),
        "NCL-ProtoNCE": Preset(
            {"temperature": 0.1, **_FIRST, "reduction": "sum"},
            "RUCAIBox/NCL ncl.py ProtoNCE_loss",
            "for users or for items, before its weight `proto_reg`",
            "(z[rows], centroids, labels=(clusters[rows], arange(len(centroids))))",
        ),
        "LightGCL": Preset(
            {"temperature": 0.2, **_DOT, **_FIRST},
            "HKUDS/LightGCL model.py forward",
            "for users and for items, where no positive's score / tau reaches its clamp at 5",
            _TABLE,
        ),
    },
    "Graphs and texts, knowledge graphs": {
        "CLIP": Preset(
            {"temperature": 0.07, **_CROSS},
            "mlfoundations/open_clip src/open_clip/loss.py ClipLoss",
            "also GraphCLIP; give a [learned temperature](losses.md#a-learned-temperature)",
            "(images, texts)",
        ),
        "GraphGPT": Preset(
            {"temperature": 0.07, **_CROSS},
            "HKUDS/GraphGPT text-graph-grounding/model_gt.py cal_cl_loss",
            "for each pair",
        ),
        "MoleculeSTM": Preset(
            {"temperature": 0.1, **_CROSS},
            "chao1224/MoleculeSTM scripts/pretrain.py do_CL",
            "`--SSL_loss=InfoNCE`, the mean of both calls; `do_CL` also returns an accuracy; "
            '`--no_normalize`: also `similarity="dot"`',
        ),
        "SimKGC": Preset(
            {"temperature": 0.05, **_CROSS},
            "intfloat/SimKGC models.py compute_logits",
            "without its margin and self-negatives; pairs: `(i, N + j)`, `(N + j, i)` of "
            "`~triplet_mask`",
            value="2 * loss_of(hr, tail, labels=arange(N), positives=pairs, "
            "positive_weights=zeros(len(pairs[0])))",
        ),
    },
    "Labels, sentences, prototypes": {
        "SupCon": Preset(
            {"temperature": 0.1, "over_positives": "supcon"},
            "KevinMusgrave/pytorch-metric-learning "
            "src/pytorch_metric_learning/losses/supcon_loss.py SupConLoss",
            "which is 0 for a batch of one class",
            "(z, labels=labels)",
        ),
        "SupContrast": Preset(
            {"temperature": 0.07, "over_positives": "supcon"},
            "HobbitLong/SupContrast losses.py SupConLoss",
            '`contrast_mode="one"`: also `queries="first"`; also GraphCLIP\'s `sup_loss`',
            value="loss_of.temperature / 0.07 * loss_of(view1, view2, labels=labels)",
        ),
        "NTXentLoss": Preset(
            {"temperature": 0.07, "reduction": "none"},
            "KevinMusgrave/pytorch-metric-learning "
            "src/pytorch_metric_learning/losses/ntxent_loss.py NTXentLoss",
            "a mean over all pairs; `counts` are the positives of each embedding",
            value="(loss_of(z, labels=labels) * counts).sum() / counts.sum()",
        ),
        "sentence-transformers": Preset(
            {"temperature": 0.05, **_FIRST},
            "UKPLab/sentence-transformers sentence_transformers/losses/"
            "MultipleNegativesRankingLoss.py MultipleNegativesRankingLoss",
            "`temperature` is 1 / `scale`; [hard negatives](swap.md#labels-sentences-prototypes)",
            "(anchors, positives)",
        ),
        "info-nce-pytorch": Preset(
            {"temperature": 0.1, **_FIRST},
            "RElbers/info-nce-pytorch info_nce/__init__.py info_nce",
            "paired `negative_keys` are [listed negatives](swap.md#links-with-sampled-negatives)",
            "(query, positive_key)",
        ),
        "PCL": Preset(
            {"temperature": 1.0, **_DOT, **_FIRST},
            "salesforce/PCL pcl/builder.py MoCo",
            "ProtoNCE of one clustering; [`ids`](swap.md#labels-sentences-prototypes)",
            "(normalize(q), prototypes[ids] / density[ids, None], "
            "labels=(arange(len(q)), arange(len(ids))))",
        ),
    },
    "Clusters": {
        "X-GOAL": Preset(
            {"temperature": 1.0, "queries": "first"},
            "baoyujing/X-GOAL models/model.py info_nce",
            "`pairs` are `(i, 2 * N + i)`; [`node_alignment`](swap.md#clusters)",
            "(h_org, h_pos, h_neg, labels=(arange(N), arange(N), N + arange(N)), "
            "negative_pairs=pairs)",
        ),
        "Contrastive-Clustering": Preset(
            {"temperature": 0.5},
            "Yunfan-Li/Contrastive-Clustering modules/contrastive_loss.py InstanceLoss",
            call="(z_i, z_j)",
        ),
        "Contrastive-Clustering-clusters": Preset(
            {"temperature": 1.0, "gather": False},
            "Yunfan-Li/Contrastive-Clustering modules/contrastive_loss.py ClusterLoss",
            "before its [entropy](swap.md#clusters)",
            "(c_i.T, c_j.T)",
        ),
    },
}
PRESETS = {name: preset for group in GROUPS.values() for name, preset in group.items()}


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def find_preset(name: str) -> tuple[str, Preset]:
    """Find a preset by its name, in which case, hyphens and spaces do not matter.

    The error for an unknown name hints at presets whose `where` or `note` mentions it, as SELFRec's
    mentions SimGCL, or whose names are similar.
    """
    by_key = {_key(each): each for each in PRESETS}
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a script, but got {name!r}")
    if _key(name) not in by_key:
        texts = {each: f"{x.where} {x.note}".lower() for each, x in PRESETS.items()}
        near = [each for each, text in texts.items() if name and name.lower() in text]
        near += [by_key[key] for key in difflib.get_close_matches(_key(name), by_key)]
        near = list(dict.fromkeys(near))[:5]
        hint = f"did you mean {' or '.join(near)}?" if near else f"names are {', '.join(PRESETS)}."
        hint = "PGCL is PGCLLoss(dim)." if _key(name) in ("pgcl", "pgclloss") else hint
        more = "recognize(your_loss) says which loss a function is"
        raise ValueError(f"there is no script {name!r}: {hint} {more}")
    found = by_key[_key(name)]
    return found, PRESETS[found]
