"""Whose model it is and under which terms: the fields that hubs read before a model card, and the card's section on the licence."""

from __future__ import annotations

import re

import yaml

from arctool.bake.card.markdown import code, plain
from arctool.bake.card.subject import Subject
from arctool.uqff.container import BakeInfo

TAGS = ("arctool", "uqff", "qtip", "quantized")

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
"""A hub's repository, with or without a revision; a local directory's name has no slash."""

LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
"""What a hub takes for a licence's identifier; anything else is its `other`, with a name."""


def front_matter(subject: Subject) -> str:
    """The fields that hubs read, as YAML between two lines of dashes."""
    info = subject.info
    fields: dict[str, object] = dict(licence_fields(subject))
    name, _ = base_model(info)
    if name is not None:
        fields |= {"base_model": name, "base_model_relation": "quantized"}
    fields |= {"library_name": "arctool", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=10**9)}---"


def licence_fields(subject: Subject) -> dict[str, str]:
    """`license` and what it needs: an identifier as it is; else `other` with the source's own words, or `unknown`."""
    info = subject.info
    known = info.licence is not None and info.licence not in subject.licence_files and LICENCE_ID.fullmatch(info.licence) is not None
    link = info.licence_link or next(iter(subject.licence_files), None)
    name = info.licence_name
    if not known and name is None and info.licence not in subject.licence_files:
        name = info.licence
    fields = {"license": info.licence if known else "unknown" if info.licence is None and link is None else "other"}
    if name is not None:
        fields["license_name"] = name
    if link is not None and (not known or info.licence == "other"):
        fields["license_link"] = link
    return {key: plain(value) for key, value in fields.items() if value is not None}


def base_model(info: BakeInfo) -> tuple[str | None, str | None]:
    """(what the artifact was made from, the revision if that is a hub's repository and one was named)."""
    if info.base_model is None:
        return None, None
    found = HUB_NAME.fullmatch(info.base_model)
    return (plain(info.base_model), None) if found is None else (found.group(1), found.group(2))


def licence(subject: Subject) -> str:
    """Whose terms hold, and where they are."""
    info, files = subject.info, subject.licence_files
    if info.licence in files:
        said = "Its card names none, it comes with a file."
    elif info.licence is None:
        said = "It declares none that arctool could read."
    else:
        said = f"It is {code(info.licence)} there."
    said += "" if info.licence_name is None else f" Its name: {code(info.licence_name)}."
    said += "" if info.licence_link is None else f" Its terms: {code(info.licence_link)}."
    said += f" Copied from the source, unchanged: {', '.join(map(code, files))}." if files else ""
    return (
        f"## Licence\n\nThe weights are made from the source's, whose licence holds for them as well. {said} The source's own page may ask "
        "for more, such as naming its authors or refraining from some uses: read it before you pass this on."
    )
