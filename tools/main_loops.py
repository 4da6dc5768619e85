"""What ptxas has made of the main loops: `python tools/main_loops.py build/kernels/NAME.o ...`.

Of each kernel it lists the innermost loops with matrix products: how many instructions and products
they have, how many that read a special register (S2R, which all behind it wait for) and how many
that spill. With ``--order`` also what stands between the waits and arrivals of a loop.

It needs `cuobjdump` and `nvdisasm` on PATH, of the CUDA toolkit or of the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. It needs no GPU.
"""

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The end of a section of a loop, by what its instruction begins with.
MARKS = {
    "SYNCS.PHASECHK": "wait?",  # asks a barrier; a branch behind it goes on if it has completed
    "SYNCS.ARRIVE": "arrive",
    "BAR.SYNC": "sync",
    "BAR.ARV": "arrive",
    "WARPGROUP.DEPBAR": "products",  # waits for matrix products
    "FENCE": "fence",
    "BRA": "branch",
}
KINDS = {
    "HGMMA": "product",
    "IGMMA": "product",
    "QGMMA": "product",
    "HMMA": "product",
    "MUFU": "exponential",
    "F2FP": "conversion",
    "LDS": "load",
    "STS": "store",
    "S2R": "S2R",
    "LDL": "spill",
    "STL": "spill",
}


class Loop(NamedTuple):
    instructions: list[str]  # without their addresses

    @property
    def counts(self) -> Counter[str]:
        return Counter(named(text, KINDS) or "other" for text in self.instructions)

    @property
    def order(self) -> str:
        """Counts of what stands in front of each mark, and the marks."""
        parts: list[str] = []
        section: Counter[str] = Counter()
        for text in self.instructions:
            if mark := named(text, MARKS):
                parts += [f"{n} {kind}" for kind, n in section.items()] + [f"| {mark} |"]
                section.clear()
            else:
                section[named(text, KINDS) or "other"] += 1
        return " ".join(parts)


def named(text: str, names: dict[str, str]) -> str:
    """The name of an instruction, by what it begins with behind its predicate; "": none."""
    opcode = re.sub(r"^@!?U?P\w+ ", "", text)
    return next((name for start, name in names.items() if opcode.startswith(start)), "")


def kernels(objects: Sequence[str]) -> Iterator[tuple[str, dict[int, str]]]:
    """Name and instructions, by address, of each kernel."""
    for path in objects:
        command = ["cuobjdump", "-sass", path]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for kernel in re.split(r"\n\s*Function : ", sass)[1:]:
            found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", kernel)
            yield kernel.split("\n", 1)[0], {int(address, 16): text for address, text in found}


def main_loops(instructions: dict[int, str]) -> Iterator[Loop]:
    """The innermost loops with a matrix product."""
    loops: dict[tuple[int, int], Loop] = {}
    for end, text in instructions.items():
        branch = re.search(r"BRA.* 0x([0-9a-f]+)$", text)
        if branch and (begin := int(branch[1], 16)) <= end:
            loop = Loop([text for at, text in instructions.items() if begin <= at <= end])
            if loop.counts["product"]:
                loops[begin, end] = loop
    for (begin, end), loop in loops.items():
        # A wait that takes longer jumps behind the kernel, and from there back into its loop.
        inside = any(begin <= a <= b <= end and (a, b) != (begin, end) for a, b in loops)
        back = any(a < begin <= b < end for a, b in loops)
        if not inside and not back:
            yield loop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("objects", nargs="+", help="object files or cubins")
    parser.add_argument("--kernel", default="", help="a regular expression: of names with it alone")
    parser.add_argument("--order", action="store_true", help="what stands between waits")
    arguments = parser.parse_args()
    for name, instructions in kernels(arguments.objects):
        if not re.search(arguments.kernel, name):
            continue
        for loop in main_loops(instructions):
            counts = loop.counts
            print(
                f"{name}: {len(loop.instructions)} instructions, {counts['product']} products, "
                f"{counts['S2R']} S2R, {counts['spill']} spills"
            )
            if arguments.order:
                print(f"  {loop.order}")


if __name__ == "__main__":
    main()
