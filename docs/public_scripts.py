"""Ask `recognize` which losses public scripts have, and write the record.

python -m docs.public_scripts COPIES

COPIES/owner/name are clones: git clone https://github.com/owner/name COPIES/owner/name, of which
only the git directory is read. A function is compiled from its file at the commit of its row,
without the rest of the file. No code of the scripts is part of this project.
"""

import __future__

import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, arange, nn

import pgcl_losses
from pgcl_losses import InfoNCE, recognize

DOCS = Path(__file__).parent
RECORD = DOCS / "public_scripts.json"
Loss = Callable[..., Any]  # a function that returns a scalar


class Row(NamedTuple):
    """A function of a script, and how it is called."""

    source: str  # owner/name@commit
    place: str  # path:name, then other names that the function calls, of the same file or of others
    temperature: float  # the script's default
    default: str  # where the script has this default
    # The function to call, by a module with the names of `place`, and by the temperature: one of
    # two views for `recognize`, or, if the row has a line, one of what `given` returns.
    call: Callable[[Any, float], Loss]
    remark: str
    line: str = ""  # ours, where `recognize` cannot be asked because there are other inputs
    labels: bool = False


def every(loss: Loss) -> Loss:
    """Call a loss with the positions of all rows, as those of the batch."""
    return lambda z1, z2: loss(z1, z2, arange(len(z1)))


def both_ways(loss: Loss) -> Loss:
    """Take the mean of a loss of each query and of both directions, as the script does."""
    return lambda z1, z2: ((loss(z1, z2) + loss(z2, z1)) * 0.5).mean()


def weighted(m: Any, t: float) -> Loss:
    """Call iMolCLR's loss with fingerprints in place of molecules."""
    m.AllChem = SimpleNamespace(GetMorganFingerprint=lambda bits, *_, **__: bits.bool())
    m.Chem = SimpleNamespace(AddHs=lambda bits: bits)
    m.DataStructs = SimpleNamespace(TanimotoSimilarity=lambda a, b: (a & b).sum() / (a | b).sum())
    return lambda x: m.WeightedNTXentLoss("cpu", t)(*map(F.normalize, (x.z1, x.z2)), x.fingerprints)


def users_and_items(m: Any, t: float) -> Loss:
    """Call AdaGCL's loss with 4 users and some items."""

    def loss(z1: Tensor, z2: Tensor) -> Any:
        m.args.user, m.args.item = 4, len(z1) - 4
        return m.this().loss_graphcl(z1, z2, arange(4), arange(len(z1) - 4)).mean()

    return loss


def progcl(m: Any, t: float) -> Loss:
    """Call ProGCL's loss after the epoch of the fit, which leaves the weights as a global."""
    weigh = partial(m.this(tau=t).semi_loss_bmm, epoch=1, bmm_model=None)
    options = SimpleNamespace(epoch_start=0, mode="weight")

    def loss(x: Any) -> Any:
        m.B = x.weights[~torch.eye(x.N, dtype=torch.bool)].view(x.N, -1)
        return both_ways(partial(weigh, args=options))(x.z1, x.z2)

    return loss


def unit(loss: Loss) -> Loss:
    """Normalise the embeddings first, as the caller does in the script."""
    return lambda z1, z2: loss(F.normalize(z1), F.normalize(z2))


_SUM = 'negatives="cross", queries="first", reduction="sum"'
_EACH = 'negatives="cross", queries="first", reduction="none"'
_THIRD = "labels=(arange(N), arange(N), N + arange(N))"
# fmt: off
SCRIPTS = {
    "Nodes and graphs": [
        Row("BUPT-GAMMA/SpCo@925468c", "grace_spco/model.py:semi_loss sim", 0.5, "`tau`",
            lambda m, t: both_ways(m.this(tau=t).semi_loss),
            "GRACE, whose graph is augmented by SpCo; `config.yaml` has 0.4 to 0.9"),
        Row("HanChen-HUST/CSGCL@23a0236", "src/model.py:_team_up _sim", 0.5, "`tau`",
            lambda m, t: both_ways(partial(m.this(tau=t)._team_up, cs=torch.ones(1),
                current_ep=0, t0=500, gamma_max=1)),
            "in the first `t0` epochs; the files in `param/` have 0.2 to 0.6"),
        Row("HanChen-HUST/CSGCL@23a0236", "src/model.py:_team_up _sim", 0.5, "`tau`",
            lambda m, t: lambda x: both_ways(partial(m.this(tau=t)._team_up, cs=x.centrality,
                current_ep=100, t0=0, gamma_max=1))(x.z1, x.z2),
            "later: cosines count more by `gamma` times the community strength of both nodes",
            "InfoNCE(temperature=0.5, score_mod=lambda s, pair: s + gamma * (pair.key - pair.query)"
            " / pair.temperature)(z1, z2, metadata=centrality)"),
        Row("flyingtango/DiGCL@30b3081", "code/model_digcl.py:semi_loss sim", 0.5, "`tau`",
            lambda m, t: lambda x: both_ways(m.this(tau=t).semi_loss)(x.z1, x.z2),
            "nodes of the other view are no negatives; `config_digcl.yaml` has 0.4 and 0.9",
            "InfoNCE(temperature=0.5, score_mod=lambda s, pair: s.masked_fill(pair.query != "
            "pair.key, -inf))(z1, z2, metadata=[zeros(N), ones(N)])"),
        Row("junxia97/ProGCL@3580f64", "pGRACE/model.py:semi_loss sim", 0.4, "`train.py`",
            lambda m, t: both_ways(partial(m.this(tau=t).semi_loss, epoch=0)),
            "before the epoch `epoch_start`"),
        Row("junxia97/ProGCL@3580f64", "pGRACE/model.py:semi_loss_bmm sim", 0.4, "`train.py`",
            progcl, "later, with `mode='weight'`: the probabilities of one epoch are kept; those "
            "between the views also weigh negatives within a view, and those of the queries of "
            "the first view also weigh for the second",
            "InfoNCE(temperature=0.4, score_mod=lambda s, pair: s + weights[pair.query, pair.key]"
            ".log())(z1, z2, metadata=arange(N))"),
        Row("shenxiaocam/NCLA@f60de4b", "loss.py:contrastive_loss nei_con_loss sim", 1.0, "`tau`",
            lambda m, t: lambda x: m.contrastive_loss(x.z1, x.z2, x.adjacency, tau=t),
            "a node's neighbours in both views are positives; the script divides their sum by "
            "their number, which adds a constant",
            'InfoNCE(temperature=1.0, over_positives="sum")(z1, z2, labels=arange(N), '
            "positives=neighbours) + (2 * degrees + 1).log().mean()"),
        Row("Cloudy1225/PyAGC@24d3c78", "pyagc/models/magi.py:_compute_loss", 0.5, "`tau`",
            lambda m, t: lambda x: m.this(tau=t)._compute_loss(F.normalize(x.z1), x.edges),
            "a mean over pairs; the official script, `MAGI` in the guide, has a mean over queries",
            '(InfoNCE(temperature=0.5, over_positives="supcon", reduction="none")(z1, '
            "positives=edges) * degrees).sum() / degrees.sum()"),
        Row("GRAND-Lab/MERIT@f36e9a9", "net/merit.py:contrastive_loss_wo_cross_network sim", 1.0,
            "no option", lambda m, t: lambda a, b: m.contrastive_loss_wo_cross_network(
                a, b, None).mean(), "without a temperature, times `beta`"),
        Row("GRAND-Lab/MERIT@f36e9a9", "net/merit.py:contrastive_loss_wo_cross_view sim", 1.0,
            "no option", lambda m, t: lambda a, b: m.contrastive_loss_wo_cross_view(
                a, None, b.detach()).mean(), "with the target network, times `1 - beta`"),
        Row("yifeiacc/COSTA@f2091df", "src/model/COSTA.py:DualBranchContrast InfoNCE "
            "src/util/helper.py:_similarity", 0.1, "`COSTA_default.yaml`",
            lambda m, t: m.DualBranchContrast(m.InfoNCE(t), "L2L"),
            "`intraview_negs=True` has no effect; other data sets have 0.2 to 1"),
        Row("Somedaywilldo/AutoGCL@203bd3a", "unsupervised/us_main.py:loss_cl", 0.5, "in the code",
            lambda m, t: m.loss_cl, "the same function is in `semi_supervised` and `transfer`"),
        Row("lsh0520/RGCL@807ff9f", "unsupervised_TU/rgcl.py:loss_cal", 0.2, "in the code",
            lambda m, t: lambda x: m.loss_cal(None, x.z1, x.z2, x.z3),
            "two losses within one logarithm; the second one has a third set as negatives, see "
            "[RGCL](negatives.md#a-third-set-as-negatives)",
            f'-((-InfoNCE(temperature=0.2, {_EACH})(z1, z2)).exp() + 0.1 * '
            f"(-InfoNCE(temperature=0.2, {_EACH}, "
            f"score_mod=of_the_third_set)(z1, z2, z3, {_THIRD}, metadata=[ones(N), 2 * ones(N), "
            "3 * ones(N)])).exp()).log().mean()"),
        Row("junkangwu/ADNCE@cdd110f", "graph/gsimclr_robust.py:loss_cal get_negative_mask", 0.2,
            "our choice", lambda m, t: lambda a, b: m.loss_cal(None, a, b, "easy", m.args),
            "`mode=easy`; the script has no default; a mean over negatives in place of the sum"),
        Row("junkangwu/ADNCE@cdd110f", "graph/gsimclr_robust.py:loss_cal get_negative_mask", 0.2,
            "our choice", lambda m, t: lambda x: m.loss_cal(None, x.z1, x.z2, "adnce", m.args),
            "`mode=adnce`, with `w1=0.7` and `w2=1`, see [ADNCE](negatives.md#weights-of-papers)",
            'InfoNCE(temperature=0.2, negatives="cross", queries="first", decoupled=True, '
            "score_mod=adnce)(z1, z2) - math.log(N - 1)"),
        Row("Starlien95/GraphPrompt@f27e832", "nodedownstream/utils.py:compareloss", 1.0,
            "`pre_train.py`", lambda m, t: lambda x: m.compareloss(
                torch.stack([x.z1, x.z2, x.z3], 2), t),
            "one negative for each positive, which is not in the denominator",
            'InfoNCE(temperature=1.0, negatives="cross", queries="first", decoupled=True)(z1, z2, '
            f"z3, {_THIRD}, negative_pairs=torch.stack([arange(N), 2 * N + arange(N)]))"),
    ],
    "Molecules": [
        Row("HICAI-ZJU/KANO@766b478", "chemprop/models/loss/loss.py:ContrastiveLoss "
            "chemprop/models/loss/loss_computer.py:NCESoftmaxLoss", 0.1, "`--temperature`",
            lambda m, t: m.ContrastiveLoss("nce_softmax", t, SimpleNamespace(device="cpu")),
            "the argument has no effect: cosines are multiplied by 20"),
        Row("lsh0520/RGCL@807ff9f", "transferLearning/chem/pretrain_rgcl.py:loss_cl", 0.1,
            "`--loss_temp`", lambda m, t: lambda a, b: m.loss_cl(None, a, b, t),
            "also the first loss of `loss_ra`"),
        Row("lsh0520/RGCL@807ff9f", "transferLearning/chem/pretrain_rgcl.py:loss_ra", 0.1,
            "`--loss_temp`", lambda m, t: lambda x: m.loss_ra(None, x.z1, x.z2, x.z3, t, 0.1)[1],
            "its second loss `cp_loss`; it is added with the factor `--lamda`",
            'InfoNCE(temperature=0.1, negatives="cross", queries="first", '
            f"score_mod=of_the_third_set)(z1, z2, z3, {_THIRD}, metadata=[ones(N), 2 * ones(N), "
            "3 * ones(N)])"),
        Row("yuyangw/iMolCLR@6c85a80", "utils/nt_xent.py:NTXentLoss", 0.1, "`config.yaml`",
            lambda m, t: m.NTXentLoss("cpu", t, True), "for fragments, with the factor `lambda_2`"),
        Row("yuyangw/iMolCLR@6c85a80", "utils/weighted_nt_xent.py:WeightedNTXentLoss", 0.1,
            "`config.yaml`", weighted, "for molecules; the script's factors are in float32",
            "InfoNCE(temperature=0.1, score_mod=imolclr)(z1, z2, metadata=fingerprints)"),
    ],
    "Recommendation": [
        Row("RUCAIBox/RecBole-GNN@632ef88", "recbole_gnn/model/general_recommender/simgcl.py:"
            "calculate_cl_loss", 0.2, "`SimGCL.yaml`",
            lambda m, t: m.this(temperature=t).calculate_cl_loss, "a sum over users or items"),
        Row("RUCAIBox/RecBole-GNN@632ef88", "recbole_gnn/model/general_recommender/xsimgcl.py:"
            "calculate_cl_loss", 0.2, "`XSimGCL.yaml`",
            lambda m, t: m.this(temperature=t).calculate_cl_loss, "a mean, where SimGCL has a sum"),
        Row("RUCAIBox/RecBole-GNN@632ef88", "recbole_gnn/model/social_recommender/sept.py:"
            "calculate_ssl_loss", 0.1, "`SEPT.yaml`", lambda m, t: lambda x: m.this(ssl_tau=t,
                instance_cnt=3).calculate_ssl_loss(x.z2, x.similar, x.z1),
            "the users that two other views find most similar are positives",
            f'InfoNCE(temperature=0.1, similarity="dot", over_positives="sum", {_SUM})(z1, z2, '
            "labels=(arange(N), N + arange(N)), positives=torch.stack([arange(N)"
            ".repeat_interleave(3), N + similar.flatten()]))"),
        Row("HKUDS/KGRec@07431ac", "modules/KGCL/KGCL.py:infonce_overall", 0.2, "`--tau`",
            lambda m, t: lambda x: m.this(tau=t).infonce_overall(x.z1[x.batch], x.z2[x.batch],
                x.z2), "its KGCL; all users or items are negatives",
            f"InfoNCE(temperature=0.2, {_SUM})(z1[batch], z2, labels=(batch, arange(N)))"),
        Row("HKUDS/KGRec@07431ac", "modules/contrast.py:loss self_sim Contrast", 1.0, "`--cl_tau`",
            lambda m, t: lambda a, b: m.this(tau=t).loss(a, b).mean(),
            "each item has two negatives of one random permutation, and its positive is in the "
            "denominator twice; `KGRec.py` has 0.1, 0.2 or 1 by data set"),
        Row("HKUDS/DiffKG@c924659", "Utils/Utils.py:contrastLoss", 0.1, "`--temp`",
            lambda m, t: every(partial(m.contrastLoss, temp=t)), "views with and without a "
            "denoised knowledge graph"),
        Row("HKUDS/DCCF@c9bcac4", "model.py:cal_loss", 1.0, "`--temp`",
            lambda m, t: unit(m.cal_loss),
            "adds 1e-8 to the denominator and within the logarithm"),
        Row("HKUDS/MMSSL@f8d8955", "MMSSL/main.py:batched_contrastive_loss sim", 0.5, "`--tau`",
            lambda m, t: m.this().batched_contrastive_loss, "one direction of GRACE"),
        Row("HKUDS/SimRec@0b0f66b", "methods/SimRec/Utils/Utils.py:infoNCE", 0.1, "`--tempcd`",
            lambda m, t: every(partial(m.infoNCE, temp=t)), "adds 1e-8 to embeddings "
            "and to the denominator"),
        Row("akaxlh/HCCF@44fd819", "torchVersion/Utils/Utils.py:contrastLoss", 0.1, "`README.md`",
            lambda m, t: every(partial(m.contrastLoss, temp=t)), "adds 1e-8 to embeddings and to "
            "the denominator; the default of `--temp` is 1"),
        Row("HKUDS/AdaGCL@bfb4cdf", "Model.py:loss_graphcl", 0.5, "`--temp`",
            users_and_items, "users and items are negatives of each other"),
        Row("enoche/MMRec@e775373", "src/models/mgcn.py:InfoNCE", 0.2, "in the code",
            lambda m, t: partial(m.this().InfoNCE, temperature=t),
            "of MGCN; the same function is in PGL and SMORE"),
        Row("enoche/MMRec@e775373", "src/models/lgmrec.py:ssl_triple_loss", 0.2, "in the code",
            lambda m, t: lambda a, b: m.this(tau=t).ssl_triple_loss(a, b, b), "of LGMRec; a sum"),
        Row("HKUDS/GFormer@b2b7baf", "GFormer-main/Utils/Utils.py:contrast", 1.0, "no option",
            lambda m, t: lambda x: m.contrast(x.batch, x.z1, x.z2)
                - (x.z1[x.batch] * x.z2[x.items]).sum(1).mean(),
            "together with `bprLoss` of `Main.py`, which is minus the mean score of positives",
            'InfoNCE(temperature=1.0, similarity="dot", negatives="cross", queries="first")('
            "z1[batch], z2, labels=(items, arange(N)))"),
        Row("HKUDS/GFormer@b2b7baf", "GFormer-main/Utils/Utils.py:contrastNCE", 1.0, "no option",
            lambda m, t: lambda a, b: m.contrastNCE(arange(len(a)), a, b),
            "its sums run over the dimensions of an embedding, and over no other nodes"),
    ],
    "Other fields": [
        Row("Gartner-Lab/Concord@ac3a289", "src/concord/model/loss.py:NTXent_general", 0.4,
            "`concord.py`", lambda m, t: m.NTXent_general(t, beta=1.0),
            "single cells; `beta` is `hardness`"),
        Row("Spijkervet/SimCLR@2738efa", "simclr/modules/nt_xent.py:NT_Xent", 0.5, "`config.yaml`",
            lambda m, t: lambda a, b: m.NT_Xent(len(a), t, 1)(a, b), "images"),
        Row("PyTorchLightning/lightning-bolts@e1f9c9c",
            "pl_bolts/losses/self_supervised_learning.py:nt_xent_loss", 0.1, "`simclr_module.py`",
            lambda m, t: unit(partial(m.nt_xent_loss, temperature=t)), "images"),
        Row("PyTorchLightning/lightning-bolts@e1f9c9c",
            "pl_bolts/models/self_supervised/simclr/simclr_module.py:nt_xent_loss", 0.1,
            "`temperature`", lambda m, t: unit(partial(m.this().nt_xent_loss, temperature=t)),
            "leaves an embedding itself out of the "
            "denominator at temperature 1 only: it subtracts e in place of exp(1 / temperature)"),
        Row("vturrisi/solo-learn@9187ea3", "solo/losses/simclr.py:simclr_loss_func", 0.1,
            "`temperature`", lambda m, t: m.simclr_loss_func,
            "images; for SimCLR and, with classes as labels, for its SupCon", labels=True),
        Row("vturrisi/solo-learn@9187ea3", "solo/losses/nnclr.py:nnclr_loss_func", 0.1,
            "`temperature`", lambda m, t: lambda a, b: m.nnclr_loss_func(a.detach(), b),
            "images; the first argument are nearest neighbours"),
    ],
}
# fmt: on

# Functions of the guide, for the figures in docs/swap.md. The remark is the name in the guide.
# fmt: off
GUIDE = [
    Row("Shen-Lab/GraphCL@b4d7501", "unsupervised_TU/gsimclr.py:loss_cal", 0.2, "",
        lambda m, t: m.this().loss_cal, "GraphCL"),
    Row("Shen-Lab/GraphCL@b4d7501",
        "transferLearning_MoleculeNet_PPI/chem/pretrain_graphcl.py:loss_cl", 0.1, "",
        lambda m, t: m.this().loss_cl, "GraphCL"),
    Row("Shen-Lab/GraphCL_Automated@8f3c2ac", "unsupervised_TU/joao.py:loss_cal", 0.2, "",
        lambda m, t: m.this().loss_cal, "JOAO"),
    Row("junxia97/SimGRACE@badf371", "unsupervised_TU/simgrace.py:loss_cal", 0.2, "",
        lambda m, t: m.this().loss_cal, "SimGRACE"),
    Row("susheels/adgcl@2605ef8", "unsupervised/learning/ginfominmax.py:calc_loss", 0.2, "",
        lambda m, t: partial(m.calc_loss, temperature=t), "AD-GCL"),
    Row("divelab/DIG@21476b0",
        "dig/sslgraph/method/contrastive/objectives/infonce.py:NCE_loss NT_Xent", 0.5, "",
        lambda m, t: lambda a, b: m.NCE_loss([a, b], tau=t), "DIG"),
    Row("sheldonresearch/ProG@cc59eb9", "prompt_graph/pretrain/GraphCL.py:loss_cl", 0.1, "",
        lambda m, t: m.this().loss_cl, "ProG"),
    Row("sthalles/SimCLR@1848fc9", "simclr.py:info_nce_loss", 0.07, "",
        lambda m, t: lambda a, b:
            F.cross_entropy(*m.this(args=SimpleNamespace(batch_size=len(a), n_views=2,
            device="cpu", temperature=t)).info_nce_loss(torch.cat([a, b]))), "SimCLR"),
    Row("joshr17/HCL@7b4647f", "image/main.py:criterion get_negative_mask", 0.5, "",
        lambda m, t: unit(lambda a, b: m.criterion(a, b, 0.1, len(a), 1.0, "hard")), "HCL"),
    Row("raminnakhli/Decoupled-Contrastive-Learning@0b9b76d", "loss/dcl.py:DCL", 0.1, "",
        lambda m, t: unit(lambda a, b: m.DCL(t)(a, b) + m.DCL(t)(b, a)), "DCL"),
    Row("yuyangw/MolCLR@3d3bc19", "utils/nt_xent.py:NTXentLoss", 0.1, "",
        lambda m, t: lambda a, b: m.NTXentLoss("cpu", len(a), t, True)(a, b), "MolCLR"),
    Row("HannesStark/3DInfomax@5cd3262", "commons/losses.py:NTXent", 0.1, "",
        lambda m, t: lambda a, b: m.NTXent(tau=t)(a, b), "3DInfomax"),
    Row("chao1224/GraphMVP@80c42af", "src_classification/util.py:dual_CL do_CL", 0.1, "",
        lambda m, t: lambda a, b: m.dual_CL(a, b, SimpleNamespace(normalize=True, T=t,
            CL_similarity_metric="InfoNCE_dot_prod"))[0], "GraphMVP"),
    Row("CRIPAC-DIG/GRACE@b3b5ac3", "model.py:semi_loss sim loss", 0.5, "",
        lambda m, t: m.this(tau=t, projection=lambda self, z: z).loss, "GRACE"),
    Row("CRIPAC-DIG/GCA@0f17497", "pGRACE/model.py:semi_loss sim loss", 0.4, "",
        lambda m, t: m.this(tau=t, projection=lambda self, z: z).loss, "GCA"),
    Row("Coder-Yu/SELFRec@5b02294", "util/loss_torch.py:InfoNCE", 0.2, "",
        lambda m, t: lambda a, b: m.InfoNCE(a, b, t), "SELFRec"),
    Row("chao1224/MoleculeSTM@3cd986a", "scripts/pretrain.py:do_CL", 0.1, "",
        lambda m, t: lambda a, b: sum(m.do_CL(x, y, SimpleNamespace(normalize=True, T=t,
            SSL_loss="InfoNCE"))[0] for x, y in ((a, b), (b, a))) / 2, "MoleculeSTM"),
    Row("RElbers/info-nce-pytorch@a2a9c12",
        "info_nce/__init__.py:info_nce transpose normalize", 0.1, "",
        lambda m, t: m.info_nce, "info-nce-pytorch"),
    Row("Yunfan-Li/Contrastive-Clustering@61daba8",
        "modules/contrastive_loss.py:InstanceLoss", 0.5, "",
        lambda m, t: unit(lambda a, b: m.InstanceLoss(len(a), t, "cpu")(a, b)),
            "Contrastive-Clustering"),
    Row("DeepGraphLearning/GraphLoG@61c6c03", "pretrain_graphlog.py:inter_NCE_loss", 0.04, "",
        lambda m, t: lambda a, b: m.inter_NCE_loss(a, b, "cpu", tau=t)[0], "GraphLoG"),
    Row("mlfoundations/open_clip@89fb801", "src/open_clip/loss.py:ClipLoss", 0.07, "",
        lambda m, t: unit(lambda a, b: m.ClipLoss()(a, b, 1 / t)), "CLIP"),
    Row("HKUDS/GraphGPT@db25a66", "text-graph-grounding/model_gt.py:cal_cl_loss", 0.07, "",
        lambda m, t: unit(every(m.cal_cl_loss)), "GraphGPT"),
    Row("HobbitLong/SupContrast@66a8fe5", "losses.py:SupConLoss", 0.07, "",
        lambda m, t: lambda z, labels: m.SupConLoss(t)(F.normalize(z)[:, None], labels),
            "SupContrast", labels=True),
]
# fmt: on


def compiled(copies: Path, row: Row) -> ModuleType:
    """Make a module of the functions and classes that a row names, and of what they expect."""
    module, path = ModuleType("script"), ""
    nodes: list[ast.stmt] = []
    repository, commit = row.source.split("@")
    for name in row.place.split():
        path, name = name.split(":") if ":" in name else (path, name)
        command = ["git", "-C", str(copies / repository), "show", f"{commit}:{path}"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        kinds = ast.FunctionDef | ast.ClassDef
        found = (x for x in ast.walk(ast.parse(text)) if isinstance(x, kinds) and x.name == name)
        nodes.append(node := next(found))
        node.decorator_list = []
    given = SimpleNamespace(tau=row.temperature, temp=row.temperature, w1=0.7, w2=1.0)
    vars(module).update(torch=torch, t=torch, nn=nn, F=F, np=np, math=math, partial=partial)
    vars(module).update(args=given, self=given, device="cpu")
    vars(module).update(gather=lambda z: z, get_rank=lambda: 0, Tensor=Tensor, _Loss=nn.Module)
    vars(module).update(temperature=row.temperature, SMALL_NUM=math.log(1e-45))  # of files
    flags = __future__.annotations.compiler_flag  # names in annotations need not exist
    tree = ast.Module(nodes[::-1], [])  # a class after its base
    exec(compile(tree, row.source, "exec", flags, True), vars(module))

    def this(**attributes: Any) -> Any:
        """Make an object that stands for self: its methods are the module's functions."""
        return type("Self", (), {**vars(module), **attributes})()

    module.this = this  # type: ignore[attr-defined]
    return module


def given(size: int = 10) -> SimpleNamespace:
    """Make what the lines of the table use: embeddings, a graph, and what scripts know of nodes."""
    generator = torch.Generator().manual_seed(size)
    x = SimpleNamespace(N=size, gamma=1.0, batch=arange(0, size, 2))
    x.z1, x.z2, x.z3 = torch.randn(3, size, 6, dtype=torch.float64, generator=generator)
    x.z, x.labels = x.z1, arange(size) // 2
    x.centrality, eye = torch.rand(size, generator=generator).double(), torch.eye(size)
    graph = (torch.rand(size, size, generator=generator) < 0.2) | (eye.roll(1, 0) > 0)
    x.adjacency = ((graph | graph.T) & (eye == 0)).double()
    x.edges, x.degrees = x.adjacency.nonzero().T, x.adjacency.sum(1)
    x.neighbours = torch.kron(torch.ones(2, 2), x.adjacency).nonzero().T  # of both views
    x.similar = torch.stack([torch.randperm(size, generator=generator)[:3] for _ in range(size)])
    x.items = torch.randperm(size, generator=generator)[: len(x.batch)]
    x.fingerprints = (torch.rand(size, 64, generator=generator) < 0.3).double()
    weights = torch.rand(size, size, generator=generator).double() * (1 - eye)
    x.weights = weights / weights.sum(1, keepdim=True) * (size - 1) + eye  # a mean of 1
    return x


def names() -> dict[str, Any]:
    """Return what a line may name besides: functions of torch and of docs/negatives.md."""
    known: dict[str, Any] = {"__name__": "page"}
    with torch.random.fork_rng(devices=[]):
        for block in re.findall(r"```python\n(.*?)```", (DOCS / "negatives.md").read_text(), re.S):
            exec(block, known)
    allowed = torch.arange, torch.ones, torch.zeros
    known |= {function.__name__: function for function in allowed}
    return known | {"InfoNCE": InfoNCE, "torch": torch, "math": math, "inf": math.inf}


def largest_error(function: Loss, line: str) -> float:
    """Compare a line with the function of a script: the value and the gradient by all views."""
    errors = []
    for size in (8, 10, 13):
        x, found = given(size), []
        views = [z.requires_grad_() for z in (x.z1, x.z2, x.z3)]
        for value in (function(x), eval(line, names() | vars(x))):
            gradients = torch.autograd.grad(value, views, materialize_grads=True)
            found.append((value.detach(), torch.stack(gradients)))
        for ours, theirs in zip(*found, strict=True):
            errors.append(float((ours - theirs).norm() / theirs.norm()))
    return max(errors)


def answer(copies: Path, row: Row) -> dict[str, Any]:
    """Ask `recognize`, or compare with the line of the row."""
    function = row.call(compiled(copies, row), row.temperature)
    if row.line:
        error = largest_error(function, row.line)
        if error > 1e-6:
            raise ValueError(f"{row.source} {row.place}: the line is {error:.0e} off")
        found = {"kind": "checked", "line": row.line, "names": [], "differences": []}
    else:
        said = recognize(function, labels=row.labels)
        found, error = {"kind": said.kind, "line": said.line}, said.error
        found |= {"names": [*said.names], "differences": [*said.differences]}
    # A power of ten above the error, as rounding differs between processors.
    bound = 10.0 ** math.ceil(math.log10(max(error, 1e-9))) if found["kind"] != "none" else None
    about = {"temperature": row.temperature, "set in": row.default, "remark": row.remark}
    return {"source": row.source, "place": row.place, **found, "error below": bound, **about}


def record(copies: Path) -> dict[str, Any]:
    rows = [answer(copies, row) for rows in SCRIPTS.values() for row in rows]
    guide = [{"name": row.remark, **answer(copies, row)} for row in GUIDE]
    versions = {"torch": torch.__version__, "pgcl-losses": pgcl_losses.__version__}
    return {**versions, "rows": rows, "guide": guide}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
