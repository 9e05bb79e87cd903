"""The optimizer classes of other packages whose steps were read and tried: `third_party.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


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

    def is_tried(self, version: str) -> bool:
        """Tell whether a version is one of those that were read and tried."""
        return any(f"{version}.".startswith(f"{tried}.") for tried in self.versions)


def _load(path: Path) -> dict[str, Package]:
    return {
        name: Package(
            table["distribution"],
            tuple(table["versions"]),
            {module: tuple(names.split()) for module, names in table["classes"].items()},
            tuple(table.get("writers", ())),
        )
        for name, table in tomllib.loads(path.read_text()).items()
    }


PACKAGES = _load(Path(__file__).with_suffix(".toml"))
