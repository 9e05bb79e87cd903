"""Optimizer classes of other packages whose steps were read and tried.

For each of them, at these versions: `step` calls the closure, if it is given one, before it changes
anything, and nothing outside `step` (and the `writers`, which wait as steps do) writes parameters
or state. `tests/oracle/test_third_party.py` looks at this and saves beside each of them.

Not listed, and so copied inside the call, is what perturbs weights around the closure (SAM and its
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
}
