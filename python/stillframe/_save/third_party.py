"""Optimizer classes of other packages whose steps were read and tried.

For each of them, at these versions: `step` calls the closure, if it is given one, before it changes
anything, and nothing outside `step` (and the `writers`, which wait as steps do) writes parameters
or state. `tests/oracle/test_third_party.py` looks at this and saves beside each of them.

Not listed, and so copied during the call, is what perturbs weights around the closure (SAM and its
kin, the `Closure` variants of schedulefree), wraps another optimizer and writes behind its step
(Lookahead, TRAC, Magma), has other doors to its parameters (SCION's `init`, FlashAdamW's
`set_fp32_model_state_dict`, LOMO), or keeps its state in managed memory that a device writes by
itself (the paged ones of bitsandbytes).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Package:
    """What was read of one package.

    Attributes:
        distribution: Its name on PyPI.
        versions: Those that were read and tried; "1.4" means every 1.4.x.
        classes: Names of the classes, by module.
        writers: Methods beside `step` that write, where a class has them.
    """

    distribution: str
    versions: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    writers: tuple[str, ...] = ()


PACKAGES = {
    "bitsandbytes": Package(
        "bitsandbytes",
        ("0.50",),
        {
            "bitsandbytes.optim.adagrad": (
                "Adagrad",
                "Adagrad32bit",
                "Adagrad8bit",
            ),
            "bitsandbytes.optim.adam": (
                "Adam",
                "Adam32bit",
                "Adam8bit",
            ),
            "bitsandbytes.optim.adamw": (
                "AdamW",
                "AdamW32bit",
                "AdamW8bit",
            ),
            "bitsandbytes.optim.ademamix": (
                "AdEMAMix",
                "AdEMAMix8bit",
            ),
            "bitsandbytes.optim.lamb": (
                "LAMB",
                "LAMB32bit",
                "LAMB8bit",
            ),
            "bitsandbytes.optim.lars": (
                "LARS",
                "LARS32bit",
                "LARS8bit",
            ),
            "bitsandbytes.optim.lion": (
                "Lion",
                "Lion32bit",
                "Lion8bit",
            ),
            "bitsandbytes.optim.rmsprop": (
                "RMSprop",
                "RMSprop32bit",
                "RMSprop8bit",
            ),
            "bitsandbytes.optim.sgd": (
                "SGD",
                "SGD32bit",
                "SGD8bit",
            ),
        },
    ),
    "lion_pytorch": Package(
        "lion-pytorch",
        ("0.2",),
        {
            "lion_pytorch.cautious_lion": ("Lion",),
            "lion_pytorch.foreach": ("Lion",),
            "lion_pytorch.lion_pytorch": ("Lion",),
        },
    ),
    "pytorch_optimizer": Package(
        "pytorch_optimizer",
        ("4.1",),
        {
            "pytorch_optimizer.optimizer.a2grad": ("A2Grad",),
            "pytorch_optimizer.optimizer.adabelief": ("AdaBelief",),
            "pytorch_optimizer.optimizer.adabound": ("AdaBound",),
            "pytorch_optimizer.optimizer.adadelta": ("AdaDelta",),
            "pytorch_optimizer.optimizer.adafactor": ("AdaFactor",),
            "pytorch_optimizer.optimizer.adagc": ("AdaGC",),
            "pytorch_optimizer.optimizer.adahessian": ("AdaHessian",),
            "pytorch_optimizer.optimizer.adai": ("Adai",),
            "pytorch_optimizer.optimizer.adalite": ("Adalite",),
            "pytorch_optimizer.optimizer.adam_mini": ("AdamMini",),
            "pytorch_optimizer.optimizer.adamax": ("AdaMax",),
            "pytorch_optimizer.optimizer.adamc": ("AdamC",),
            "pytorch_optimizer.optimizer.adamg": ("AdamG",),
            "pytorch_optimizer.optimizer.adamod": ("AdaMod",),
            "pytorch_optimizer.optimizer.adamp": (
                "AdamP",
                "SGDP",
            ),
            "pytorch_optimizer.optimizer.adams": ("AdamS",),
            "pytorch_optimizer.optimizer.adamw": ("StableAdamW",),
            "pytorch_optimizer.optimizer.adan": ("Adan",),
            "pytorch_optimizer.optimizer.adanorm": ("AdaNorm",),
            "pytorch_optimizer.optimizer.adapnm": ("AdaPNM",),
            "pytorch_optimizer.optimizer.adashift": ("AdaShift",),
            "pytorch_optimizer.optimizer.adasmooth": ("AdaSmooth",),
            "pytorch_optimizer.optimizer.ademamix": (
                "AdEMAMix",
                "SimplifiedAdEMAMix",
            ),
            "pytorch_optimizer.optimizer.adopt": ("ADOPT",),
            "pytorch_optimizer.optimizer.aggmo": ("AggMo",),
            "pytorch_optimizer.optimizer.aida": ("Aida",),
            "pytorch_optimizer.optimizer.amos": ("Amos",),
            "pytorch_optimizer.optimizer.ano": ("Ano",),
            "pytorch_optimizer.optimizer.apollo": (
                "APOLLO",
                "ApolloDQN",
            ),
            "pytorch_optimizer.optimizer.avagrad": ("AvaGrad",),
            "pytorch_optimizer.optimizer.bcos": ("BCOS",),
            "pytorch_optimizer.optimizer.came": ("CAME",),
            "pytorch_optimizer.optimizer.conda": ("Conda",),
            "pytorch_optimizer.optimizer.dadapt": (
                "DAdaptAdaGrad",
                "DAdaptAdam",
                "DAdaptAdan",
                "DAdaptLion",
                "DAdaptSGD",
            ),
            "pytorch_optimizer.optimizer.dash": ("DASH",),
            "pytorch_optimizer.optimizer.diffgrad": ("DiffGrad",),
            "pytorch_optimizer.optimizer.dual_adam": ("DualAdam",),
            "pytorch_optimizer.optimizer.emonavi": (
                "EmoFact",
                "EmoLynx",
                "EmoNavi",
            ),
            "pytorch_optimizer.optimizer.exadam": ("EXAdam",),
            "pytorch_optimizer.optimizer.fadam": ("FAdam",),
            "pytorch_optimizer.optimizer.fira": ("Fira",),
            "pytorch_optimizer.optimizer.focus": ("FOCUS",),
            "pytorch_optimizer.optimizer.fromage": ("Fromage",),
            "pytorch_optimizer.optimizer.ftrl": ("FTRL",),
            "pytorch_optimizer.optimizer.galore": ("GaLore",),
            "pytorch_optimizer.optimizer.grams": ("Grams",),
            "pytorch_optimizer.optimizer.gravity": ("Gravity",),
            "pytorch_optimizer.optimizer.grokfast": ("GrokFastAdamW",),
            "pytorch_optimizer.optimizer.kate": ("Kate",),
            "pytorch_optimizer.optimizer.lamb": ("Lamb",),
            "pytorch_optimizer.optimizer.laprop": ("LaProp",),
            "pytorch_optimizer.optimizer.lars": ("LARS",),
            "pytorch_optimizer.optimizer.lion": ("Lion",),
            "pytorch_optimizer.optimizer.lora_rite": ("LoRARite",),
            "pytorch_optimizer.optimizer.madgrad": ("MADGRAD",),
            "pytorch_optimizer.optimizer.mars": ("MARS",),
            "pytorch_optimizer.optimizer.msvag": ("MSVAG",),
            "pytorch_optimizer.optimizer.muon.adago": ("AdaGO",),
            "pytorch_optimizer.optimizer.muon.adamuon": ("AdaMuon",),
            "pytorch_optimizer.optimizer.muon.muon": ("Muon",),
            "pytorch_optimizer.optimizer.muon.normuon": ("NorMuon",),
            "pytorch_optimizer.optimizer.nero": ("Nero",),
            "pytorch_optimizer.optimizer.novograd": ("NovoGrad",),
            "pytorch_optimizer.optimizer.padam": ("PAdam",),
            "pytorch_optimizer.optimizer.pid": ("PID",),
            "pytorch_optimizer.optimizer.pnm": ("PNM",),
            "pytorch_optimizer.optimizer.prodigy": ("Prodigy",),
            "pytorch_optimizer.optimizer.psgd": ("Kron",),
            "pytorch_optimizer.optimizer.qhadam": ("QHAdam",),
            "pytorch_optimizer.optimizer.qhm": ("QHM",),
            "pytorch_optimizer.optimizer.racs": (
                "Alice",
                "RACS",
            ),
            "pytorch_optimizer.optimizer.radam": ("RAdam",),
            "pytorch_optimizer.optimizer.ranger": ("Ranger",),
            "pytorch_optimizer.optimizer.ranger21": ("Ranger21",),
            "pytorch_optimizer.optimizer.rose": ("ROSE",),
            "pytorch_optimizer.optimizer.sara": ("SaRA",),
            "pytorch_optimizer.optimizer.schedulefree": (
                "ScheduleFreeAdamW",
                "ScheduleFreeRAdam",
                "ScheduleFreeSGD",
            ),
            "pytorch_optimizer.optimizer.sgd": (
                "ASGD",
                "AccSGD",
                "SGDSaI",
                "SGDW",
                "SignSGD",
                "VSGD",
            ),
            "pytorch_optimizer.optimizer.shampoo": (
                "ScalableShampoo",
                "Shampoo",
            ),
            "pytorch_optimizer.optimizer.sm3": ("SM3",),
            "pytorch_optimizer.optimizer.snsm": ("AdamWSN",),
            "pytorch_optimizer.optimizer.soap": ("SOAP",),
            "pytorch_optimizer.optimizer.sophia": ("SophiaH",),
            "pytorch_optimizer.optimizer.spam": (
                "SPAM",
                "StableSPAM",
            ),
            "pytorch_optimizer.optimizer.splus": ("SPlus",),
            "pytorch_optimizer.optimizer.srmm": ("SRMM",),
            "pytorch_optimizer.optimizer.sso": ("SpectralSphere",),
            "pytorch_optimizer.optimizer.swats": ("SWATS",),
            "pytorch_optimizer.optimizer.tam": (
                "AdaTAM",
                "TAM",
            ),
            "pytorch_optimizer.optimizer.tiger": ("Tiger",),
            "pytorch_optimizer.optimizer.yogi": ("Yogi",),
        },
        writers=("train", "eval"),
    ),
    "schedulefree": Package(
        "schedulefree",
        ("1.4",),
        {
            "schedulefree.adamw_schedulefree": ("AdamWScheduleFree",),
            "schedulefree.adamw_schedulefree_paper": ("AdamWScheduleFreePaper",),
            "schedulefree.adamw_schedulefree_reference": ("AdamWScheduleFreeReference",),
            "schedulefree.radam_schedulefree": ("RAdamScheduleFree",),
            "schedulefree.sgd_schedulefree": ("SGDScheduleFree",),
            "schedulefree.sgd_schedulefree_reference": ("SGDScheduleFreeReference",),
        },
        writers=("train", "eval"),
    ),
    "torchao": Package(
        "torchao",
        ("0.18",),
        {
            "torchao.optim.adam": (
                "Adam4bit",
                "Adam8bit",
                "AdamFp8",
                "AdamW4bit",
                "AdamW8bit",
                "AdamWFp8",
                "_AdamW",
            ),
        },
    ),
}
