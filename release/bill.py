"""Writes the bill of materials of a release, in CycloneDX's JSON: ``python -m release.bill dist``.

It has the files and their hashes, the packages of others that they contain, and the packages that built them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from uuid import NAMESPACE_OID, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

from .wheels import ROOT, of_commit, only

BUNDLED = "penstock/server/page/markdown-it.LICENSE.txt"
"""Names and versions of the packages in the server's page, each before its licence."""


LICENSES = "Apache-2.0 AND BSD-2-Clause AND MIT"


def digest(content: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def built_with(requirements: str) -> list[Component]:
    """The packages of a file of pinned requirements with the hashes of their files."""
    components = []
    for block in re.split(r"\n(?=\w)", requirements):
        line, *hashes = [part.strip() for part in block.split("\\\n") if not part.startswith("#")] or [""]
        if not line:
            continue
        requirement = Requirement(line)
        version = next(iter(requirement.specifier)).version
        url = PackageURL("pypi", name=requirement.name, version=version)
        places = [_place(str(url), [one.rpartition(":")[2] for one in hashes])]
        components.append(_component(requirement.name, version, url, ComponentScope.EXCLUDED, places))
    return components


def bundled(notices: str) -> list[Component]:
    """The packages in the server's page."""
    named = re.findall(r"^==== (\S+) (\S+) ====$", notices, re.MULTILINE)
    return [
        _component(name, version, PackageURL("npm", name=name, version=version), ComponentScope.REQUIRED, []) for name, version in named
    ]


def _place(url: str, hashes: list[str]) -> ExternalReference:
    found = [HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes]
    return ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(url), hashes=found)


def _component(name: str, version: str, url: PackageURL, scope: ComponentScope, places: list[ExternalReference]) -> Component:
    kind = ComponentType.LIBRARY
    return Component(type=kind, name=name, version=version, purl=url, bom_ref=str(url), scope=scope, external_references=places)


def bill(files: list[Path], requirements: str, notices: str, seconds: int) -> str:
    """The text. Seconds: the time of the commit; equal arguments give equal texts."""
    archive = next(file for file in files if file.name.endswith(".tar.gz"))
    name, _, version = archive.name.removesuffix(".tar.gz").rpartition("-")
    hashes = {file.name: digest(file.read_bytes()) for file in sorted(files)}
    places = [_place(file, [content]) for file, content in hashes.items()]
    url = PackageURL("generic", name=name, version=version)  # no index has it
    itself = _component(name, version, url, ComponentScope.REQUIRED, places)
    itself.licenses.add(LicenseExpression(LICENSES))
    parts, tools = bundled(notices), built_with(requirements)
    about = BomMetaData(component=itself, timestamp=datetime.fromtimestamp(seconds, timezone.utc))
    made = Bom(components=[*parts, *tools], metadata=about, serial_number=uuid5(NAMESPACE_OID, "".join(hashes.values())))
    made.register_dependency(itself, parts)
    text = JsonV1Dot6(made).output_as_string(indent=2)
    return text + "\n"


def main(folder: str) -> None:
    """Writes beside the files of a release."""
    archive = only("bill", folder, "*.tar.gz")
    files = [archive, *archive.parent.glob("*.whl")]
    text = bill(files, (ROOT / "release" / "requirements.txt").read_text(), (ROOT / BUNDLED).read_text(), int(of_commit()))
    place = archive.with_name(archive.name.replace(".tar.gz", ".cdx.json"))
    place.write_text(text)
    print(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
