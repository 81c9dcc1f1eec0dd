"""The lists of docs/policies.md, from the classes.  After a change: scripts/generate."""

import re
import sys
from collections.abc import Mapping

from sources import ROOT

from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.notify.targets import TARGETS
from gpuguard.policies.rules import RULES
from gpuguard.views.policy import first_sentence
from gpuguard.views.policy_language import value_of
from gpuguard.yaml_files.decoder import keys_of

PAGE = ROOT / "docs" / "policies.md"
LISTS: dict[str, Mapping[str, type]] = {"Rules": RULES, "Actions": ACTION_KEYS, "Ways to send messages": TARGETS}


def listed(nouns: Mapping[str, type]) -> str:
    """One item for each, with its keys."""
    items = []
    for name, noun in nouns.items():
        hints, optional = keys_of(noun)
        keys = ", ".join(
            f"`{key}`{'' if key in optional else ' (needed)'}: {value_of(hint)[0]}" for key, hint in hints.items()
        )
        items.append(f"- `{name}`: {first_sentence(noun)}{f' {keys}' if keys else ''}")
    return "\n".join(items) + "\n"


def with_lists(page: str) -> str:
    """*page* with fresh lists."""
    for heading, nouns in LISTS.items():
        section = re.search(rf"^## {heading}\n.*?(?=^## )", page, re.M | re.S)
        assert section, heading
        old = re.search(r"^(?:- .*\n)+|^[A-Z]+\n(?=$|## |\Z)", section[0], re.M)
        assert old, heading
        fresh = section[0].replace(old[0], listed(nouns) + ("" if old[0].startswith("-") else "\n"))
        page = page.replace(section[0], fresh)
    return page


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
