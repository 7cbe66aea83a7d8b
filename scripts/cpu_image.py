"""What the runtime image for machines without a GPU does without, and how PyTorch loads all the same.

The public index carries one build of PyTorch for Linux, the CUDA one. Its libraries name NVIDIA's as needed, so the
loader wants those files, 2.7 GB, even where no GPU will ever be asked for anything. The image leaves them out and has
stand-ins of the same names: every function that PyTorch imports is there and only ever says that it failed.
PyTorch asks libcudart and libcupti first, which are the real ones, and hears that there is no GPU.

``python cpu_image.py requirements LOCK`` prints the lock without what is left out; ``python cpu_image.py stand-ins
SITE_PACKAGES`` makes the stand-ins (needs gcc and binutils; nothing to do for a CPU build of PyTorch).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

LEFT_OUT = frozenset(
    {
        "nvidia-cublas",
        "nvidia-cuda-nvrtc",
        "nvidia-cudnn-cu13",
        "nvidia-cufft",
        "nvidia-cufile",
        "nvidia-curand",
        "nvidia-cusolver",
        "nvidia-cusparse",
        "nvidia-cusparselt-cu13",
        "nvidia-nccl-cu13",
        "nvidia-nvjitlink",
        "nvidia-nvshmem-cu13",
        "nvidia-nvtx",
    }
)
UNVERSIONED = {
    "libcufile.so": "cuFile",
    "libcusparseLt.so": "cusparseLt",
    "libnccl.so": "nccl",
}
"""Libraries whose symbols do not say where they belong, and how those begin."""
CUDA = re.compile(r"lib(cu(?!da\.)|nccl|nv)\w*\.so(\.\d+)*")
"""Without libcuda: that is the driver, which nobody installs with pip, and which PyTorch does without."""
TEXT = re.compile(r"Get\w*(Error|Status)\w*String|Get(Last)?ErrorString|GetLastError|Get(Error|Status)(String|Name)")
"""Functions that return a text."""


def wanted(lock: str) -> str:
    """The lock's pins without those that are left out."""
    pins = [line for line in lock.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    return "".join(f"{pin}\n" for pin in pins if pin.partition("==")[0] not in LEFT_OUT)


def missing(libraries: list[Path], present: set[str]) -> set[str]:
    """Names of the CUDA libraries that PyTorch's own libraries need, and that are not there."""
    needed: set[str] = set()
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", str(library))))
    return {name for name in needed if CUDA.fullmatch(name)} - present


def imported(libraries: list[Path], names: set[str]) -> dict[str, dict[str, str]]:
    """Functions imported of each of the libraries, and the symbol version of each, empty for none."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    prefixes = {name: prefix for name in names for stem, prefix in UNVERSIONED.items() if name.startswith(stem)}
    for library in libraries:
        homes = version_homes(library)
        for line in output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            for name in names:
                if homes.get(version) == name if version else symbol.startswith(prefixes.get(name, "?")):
                    found[name][symbol] = version
    return found


def version_homes(library: Path) -> dict[str, str]:
    """Which needed library each symbol version belongs to."""
    homes: dict[str, str] = {}
    file = ""
    for line in output("readelf", "-VW", str(library)).splitlines():
        if named := re.search(r"Version: \d+ +File: (\S+)", line):
            file = named[1]
        elif named := re.search(r"Name: (\S+) +Flags: .* +Version: \d+", line):
            homes[named[1]] = file
    return homes


def source(name: str, functions: dict[str, str]) -> str:
    """C source of a stand-in; 1 is an error in every one of these libraries."""
    lines = [f'static const char left_out[] = "{name} is left out of this image, which is for machines without a GPU";']
    for function in sorted(functions):
        if TEXT.search(function):
            lines.append(f"const char *{function}(void) {{ return left_out; }}")
        else:
            lines.append(f"long {function}(void) {{ return 1; }}")
    return "\n".join(lines) + "\n"


def version_script(functions: dict[str, str]) -> str:
    """The linker's version script: each function under the version that PyTorch asks for."""
    groups: dict[str, list[str]] = defaultdict(list)
    for function, version in sorted(functions.items()):
        groups[version].append(function)
    script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in groups.items() if version)
    return script or "{ global: *; };\n"


def make_stand_ins(site_packages: Path) -> list[str]:
    """Make a stand-in in PyTorch's own library directory for every CUDA library that is missing."""
    directory = site_packages / "torch" / "lib"
    libraries = sorted(directory.glob("*.so"))
    present = {path.name for path in (site_packages / "nvidia").rglob("*.so*")}
    names = missing(libraries, present)
    functions = imported(libraries, names)
    for name in sorted(names):
        with tempfile.TemporaryDirectory() as work:
            code, versions = Path(work) / "stand_in.c", Path(work) / "versions"
            code.write_text(source(name, functions[name]))
            versions.write_text(version_script(functions[name]))
            output(
                *("gcc", "-Os", "-s", "-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin"),
                *(f"-Wl,-soname,{name}", f"-Wl,--version-script,{versions}"),
                *("-o", str(directory / name), str(code)),
            )
    return sorted(names)


def output(*command: str) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["requirements", "stand-ins"])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    if arguments.task == "requirements":
        sys.stdout.write(wanted(arguments.path.read_text()))
    else:
        print("stand-ins:", ", ".join(make_stand_ins(arguments.path)) or "none needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
