"""The base of the groups of flags."""

from dataclasses import dataclass

from tyro.conf import OmitArgPrefixes, configure


@dataclass
class Group:
    """Flags without a prefix. `check` raises InputError for values that make no sense."""

    def __init_subclass__(cls):
        configure(OmitArgPrefixes)(cls)

    def check(self) -> None:
        pass
