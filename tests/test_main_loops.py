"""tools/main_loops.py on SASS that is written here, in the place of cuobjdump's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools/main_loops.py"

# An outer loop (0x10 to 0xa0) with a loop of products and one of exponentials in it. A wait of the
# first goes on behind the kernel (0xc0) and comes back.
SASS = """
Fatbin elf code:
\t\tFunction : attend
        /*0000*/                   S2R R0, SR_TID.X ;         /* 0x00 */
        /*0010*/                   LDS R4, [R0] ;             /* 0x00 */
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*0030*/              @!P0 BRA 0xc0 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/             @!UP1 STL [R1], R3 ;
        /*0070*/               @P1 BRA 0x20 ;
        /*0080*/                   MUFU.EX2 R1, R2 ;
        /*0090*/               @P2 BRA 0x80 ;
        /*00a0*/               @P3 BRA 0x10 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*00d0*/              @!P0 BRA 0xc0 ;
        /*00e0*/                   BRA 0x40 ;
\t\tFunction : copy
        /*0000*/                   LDS R4, [R0] ;
        /*0010*/               @P0 BRA 0x0 ;
"""


FOUND = "attend: 6 instructions, 1 products, 0 S2R, 1 spills\n"
ORDER = "  | wait? | | branch | 1 product | products | 1 spill | branch |\n"


@pytest.mark.parametrize(
    "options, printed",
    [
        ([], FOUND),
        (["--order"], FOUND + ORDER),
        (["--kernel", "att.*d"], FOUND),
        (["--kernel", "copy"], ""),
    ],
)
def test_loops_with_products(tmp_path: Path, options: list[str], printed: str) -> None:
    sass, cuobjdump = tmp_path / "a.o", tmp_path / "cuobjdump"
    sass.write_text(SASS)
    cuobjdump.write_text('#!/bin/sh\n[ "$1" = -sass ] && cat "$2"\n')
    cuobjdump.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, str(TOOL), str(sass), *options]
    result = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    assert result.stdout == printed
