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


def _classes(package: str, listed: str) -> dict[str, tuple[str, ...]]:
    """Names of classes by module, of lines such as ``module: Class Class``."""
    lines = (line.partition(":") for line in listed.split("\n") if line.strip())
    return {f"{package}.{module.strip()}": tuple(names.split()) for module, _, names in lines}


PACKAGES = {
    "bitsandbytes": Package(
        "bitsandbytes",
        ("0.50",),
        _classes(
            "bitsandbytes.optim",
            """
            adagrad: Adagrad Adagrad32bit Adagrad8bit
            adam: Adam Adam32bit Adam8bit
            adamw: AdamW AdamW32bit AdamW8bit
            ademamix: AdEMAMix AdEMAMix8bit
            lamb: LAMB LAMB32bit LAMB8bit
            lars: LARS LARS32bit LARS8bit
            lion: Lion Lion32bit Lion8bit
            rmsprop: RMSprop RMSprop32bit RMSprop8bit
            sgd: SGD SGD32bit SGD8bit
            """,
        ),
    ),
    "lion_pytorch": Package(
        "lion-pytorch",
        ("0.2",),
        _classes(
            "lion_pytorch",
            """
            cautious_lion: Lion
            foreach: Lion
            lion_pytorch: Lion
            """,
        ),
    ),
    "pytorch_optimizer": Package(
        "pytorch_optimizer",
        ("4.1",),
        _classes(
            "pytorch_optimizer.optimizer",
            """
            a2grad: A2Grad
            adabelief: AdaBelief
            adabound: AdaBound
            adadelta: AdaDelta
            adafactor: AdaFactor
            adagc: AdaGC
            adahessian: AdaHessian
            adai: Adai
            adalite: Adalite
            adam_mini: AdamMini
            adamax: AdaMax
            adamc: AdamC
            adamg: AdamG
            adamod: AdaMod
            adamp: AdamP SGDP
            adams: AdamS
            adamw: StableAdamW
            adan: Adan
            adanorm: AdaNorm
            adapnm: AdaPNM
            adashift: AdaShift
            adasmooth: AdaSmooth
            ademamix: AdEMAMix SimplifiedAdEMAMix
            adopt: ADOPT
            aggmo: AggMo
            aida: Aida
            amos: Amos
            ano: Ano
            apollo: APOLLO ApolloDQN
            avagrad: AvaGrad
            bcos: BCOS
            came: CAME
            conda: Conda
            dadapt: DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD
            dash: DASH
            diffgrad: DiffGrad
            dual_adam: DualAdam
            emonavi: EmoFact EmoLynx EmoNavi
            exadam: EXAdam
            fadam: FAdam
            fira: Fira
            focus: FOCUS
            fromage: Fromage
            ftrl: FTRL
            galore: GaLore
            grams: Grams
            gravity: Gravity
            grokfast: GrokFastAdamW
            kate: Kate
            lamb: Lamb
            laprop: LaProp
            lars: LARS
            lion: Lion
            lora_rite: LoRARite
            madgrad: MADGRAD
            mars: MARS
            msvag: MSVAG
            muon.adago: AdaGO
            muon.adamuon: AdaMuon
            muon.muon: Muon
            muon.normuon: NorMuon
            nero: Nero
            novograd: NovoGrad
            padam: PAdam
            pid: PID
            pnm: PNM
            prodigy: Prodigy
            psgd: Kron
            qhadam: QHAdam
            qhm: QHM
            racs: Alice RACS
            radam: RAdam
            ranger: Ranger
            ranger21: Ranger21
            rose: ROSE
            sara: SaRA
            schedulefree: ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD
            sgd: ASGD AccSGD SGDSaI SGDW SignSGD VSGD
            shampoo: ScalableShampoo Shampoo
            sm3: SM3
            snsm: AdamWSN
            soap: SOAP
            sophia: SophiaH
            spam: SPAM StableSPAM
            splus: SPlus
            srmm: SRMM
            sso: SpectralSphere
            swats: SWATS
            tam: AdaTAM TAM
            tiger: Tiger
            yogi: Yogi
            """,
        ),
        writers=("train", "eval"),
    ),
    "schedulefree": Package(
        "schedulefree",
        ("1.4",),
        _classes(
            "schedulefree",
            """
            adamw_schedulefree: AdamWScheduleFree
            adamw_schedulefree_paper: AdamWScheduleFreePaper
            adamw_schedulefree_reference: AdamWScheduleFreeReference
            radam_schedulefree: RAdamScheduleFree
            sgd_schedulefree: SGDScheduleFree
            sgd_schedulefree_reference: SGDScheduleFreeReference
            """,
        ),
        writers=("train", "eval"),
    ),
    "torchao": Package(
        "torchao",
        ("0.18",),
        _classes(
            "torchao.optim",
            """
            adam: Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 _AdamW
            """,
        ),
    ),
}
